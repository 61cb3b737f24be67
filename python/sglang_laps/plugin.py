"""Where LAPS meets SGLang: its entry points. Every SGLang name that is touched stands in ``seams``."""

from __future__ import annotations

import argparse
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import os
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

from laps_core.config import ConfigError, LapsConfig

from sglang_laps import graphs, options, penalties, saved_model, seams, transfers
from sglang_laps.emulation import asked
from sglang_laps.emulation.install import install
from sglang_laps.pool import PoolCell
from sglang_laps.support import conflict, no_prefill_server, off_reason, refuse, resolved, wrong_release

logger = logging.getLogger(__name__)

SERVER_ARGS = "sglang.srt.server_args"
RESOLVE = "server_args.ServerArgs.resolve_once"
SCHEDULER = "sglang.srt.managers.scheduler"
HTTP_APP_ENV = "SGLANG_HTTP_SERVER_APP_PATH"
HTTP_APP = "sglang_laps.http_app:app"
NO_HOST = "devices are emulated on machines without a GPU only, on the platform laps_host"


def load() -> None:
    """Entry point of the group ``sglang.srt.plugins``; runs once in every SGLang process."""
    try:
        _load()
    except Exception as e:
        # SGLang would log it, and serve without LAPS.
        if os.environ.get(options.ENV, "0").strip() not in ("", "0"):
            refuse(f"{options.ENV}: {type(e).__name__}: {e}")
        raise


def _load() -> None:
    seams.hook("server_args.ServerArgs.add_cli_args", _add_cli_args, "AROUND")
    seams.hook("server_args.ServerArgs.from_cli_args", _from_cli_args, "AROUND")
    try:
        config = options.from_env()
    except ConfigError as e:
        refuse(e)
    if config is not None:
        seams.hook(RESOLVE, _refuse_conflict, "AFTER")
    # Importing the scheduler costs seconds: only a process that runs one has it already.
    if SCHEDULER not in sys.modules:
        return
    try:
        emulated = asked.from_env()
    except ConfigError as e:
        refuse(e)
    enabled, wrong = config is not None or emulated is not None, wrong_release()
    if enabled and wrong:
        refuse(wrong)
    if enabled:
        seams.require()
    if not wrong and _on_host():
        from sglang_laps.host.corrections import let_the_controller_wait

        let_the_controller_wait()
    if not wrong and (config is not None or _on_host()):
        transfers.mend()  # without a GPU for stock servers too: a comparison would learn nothing from one that hangs
    if not enabled:
        return
    if emulated is not None:
        if not _on_host():
            refuse(f"{asked.ENV}: {NO_HOST}")
        install(emulated)
    if config is None:
        return
    from sglang_laps.scheduler import scheduler_class

    stock = sys.modules[SCHEDULER].Scheduler
    seams.hook("managers.scheduler.Scheduler", scheduler_class(stock, config), "REPLACE")
    transfers.be_patient()
    seams.hook(penalties.COUNT, penalties.count, "AROUND")
    graphs.install(config)


def _add_cli_args(original: Callable[..., Any], parser: argparse.ArgumentParser) -> Any:
    result = original(parser)
    options.add_flags(parser)
    return result


def _from_cli_args(original: Callable[..., Any], cls: type, args: argparse.Namespace) -> Any:
    try:
        emulate(args)
        enable(args)
    except ConfigError as e:
        refuse(e)
    _default_device(args)
    return original(cls, args)


def emulate(args: argparse.Namespace) -> None:
    """Have the processes started from here emulate a device, if the command line (or the environment) asks for it.

    Raises ConfigError.
    """
    text = options.typed(args, asked.FLAG)
    found = asked.from_env() if text is None else asked.Asked.parse(text)
    if found is None:
        return
    if wrong := wrong_release() or found.why_not(args) or (None if _on_host() else NO_HOST):
        raise ConfigError(f"{asked.FLAG}: {wrong}")
    logger.warning(found.warning())
    asked.to_env(found)


def enable(args: argparse.Namespace) -> None:
    """Turn LAPS on for the processes started from here, if the command line (or the environment) asks for it.

    Raises ConfigError. Warns once, and leaves LAPS off, where it has nothing to do.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry

    if getattr(args, "enable_piecewise_cuda_graph", False):
        logger.warning("%s is ignored: SGLang's default prefill CUDA graphs now cover it.", options.PIECEWISE)
    if args.enable_laps_scheduler:
        config: LapsConfig | None = options.from_args(args)
    else:
        if names := [flag for flag in options.OF_KNOBS if options.typed(args, flag) is not None]:
            logger.warning("%s given without %s: ignored.", ", ".join(names), options.ENABLE)
        config = options.from_env()
    if config is None:
        return
    prefills = no_prefill_server(args) is None
    if reason := off_reason(args):
        logger.warning("LAPS scheduler is off: %s.", reason)
    if reason and args.disaggregation_mode == "decode":
        os.environ.pop(options.ENV, None)
        return
    if wrong := wrong_release() or (conflict(args) if prefills else None):
        raise ConfigError(f"{options.ENABLE}: {wrong}")
    if config.graphs and not prefills:
        raise ConfigError(f"{LapsConfig.FLAGS['graphs']}: for prefill servers only")
    if prefills and (args.enable_dp_attention or (args.attn_dp_size or 1) > 1) and not args.disable_overlap_schedule:
        # A step that is decided while another runs is late by a whole one, for all ranks.
        args.disable_overlap_schedule = True
        logger.info("LAPS: data-parallel attention ranks plan together: as with --disable-overlap-schedule.")
    known = saved_model.load(config.profile_path).fitted  # a bad file is refused here, before any model loads
    options.to_env(config)
    seams.hook(RESOLVE, _refuse_conflict, "AFTER")
    HookRegistry.apply_hooks()
    seams.require_applied()
    if config.profile and not known and reason is None:
        args.warmups = ",".join(filter(None, (args.warmups, "laps_profile")))
    if reason is None:
        logger.info("LAPS scheduler on: %s", ", ".join(f"{k}={v}" for k, v in config.as_dict().items()))
    os.environ.setdefault(HTTP_APP_ENV, HTTP_APP)  # for --tokenizer-worker-num > 1: each worker imports it by name
    PoolCell.make()
    import sglang_laps.http_app  # noqa: F401  (adds the routes)


def _refuse_conflict(_: None, server_args: Any) -> None:
    """After ``ServerArgs.resolve_once``: not all that matters is typed."""
    args = resolved(server_args)
    if no_prefill_server(args) is None and (reason := conflict(args)):
        refuse(f"{options.ENABLE}: {reason}")


def _default_device(args: argparse.Namespace) -> None:
    # SGLang asks a platform for its device before it asks for its defaults, and wants a name there.
    if getattr(args, "device", None) is None and _on_host():
        args.device = "cpu"


def _on_host() -> bool:
    from sglang.srt.platforms import current_platform

    return type(current_platform).__module__ == "sglang_laps.host_platform"


def show_flags_in_serve_help(argv: Sequence[str]) -> None:
    """Have the LAPS group in ``sglang serve --help``, which prints its help without loading plugins.

    Called while SGLang resolves its platform, which is early: plugins are loaded once ``server_args`` is imported.
    """
    if "serve" in argv and {"-h", "--help"} & set(argv) and SERVER_ARGS not in sys.modules:
        sys.meta_path.insert(0, _LoadPluginsAfter(SERVER_ARGS))


class _LoadPluginsAfter(importlib.abc.MetaPathFinder):
    """Loads SGLang's plugins once, right after the import of one module."""

    def __init__(self, name: str) -> None:
        self._name = name

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            from sglang.srt.plugins import load_plugins

            execute(module)
            load_plugins()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
