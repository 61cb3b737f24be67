"""Where LAPS meets SGLang: entry points, and every SGLang name that is hooked, subclassed or replaced.

=============================================================  ====================================================
SGLang name                                                    what LAPS does with it
=============================================================  ====================================================
``server_args.ServerArgs.add_cli_args``, ``from_cli_args``     hooked: the LAPS options (always)
``server_args.ServerArgs.resolve_once``                        hooked: conflicts are refused (enabled only)
``managers.scheduler.Scheduler``                               replaced by a subclass (enabled only)
  ``get_new_batch_prefill``, ``process_prefill_chunk``,
  ``get_prefill_adder_class``, ``run_batch``,
  ``process_batch_result``, ``ingest_requests``,
  ``on_idle``, ``get_internal_state``                          overridden there, see ``scheduler.py``
``managers.schedule_policy.PrefillAdder``                      subclassed, see ``scheduler.py`` (enabled only)
``entrypoints.http_server.app``                                routes added, ``GET /laps_status`` and
                                                               ``POST /laps_pool`` (enabled only)
``sampling.sampling_params.SamplingParams.verify``             hooked: a bad deadline is answered 400 (enabled only)
``managers.tokenizer_manager.TokenizerManager``                hooked, ``_validate_one_request``: an empty prompt and
                                                               n > 1 are answered 400 (enabled only)
``entrypoints.warmup.warmup``                                  one more warm-up, ``profile.py`` (enabled only)
``model_executor.model_runner.ModelRunner.init_cuda_graphs``   hooked (prefill graphs enabled only): ``graphs/``
``model_executor.model_runner_components.cuda_graph_setup``    ``capture_prefill_graph`` called once more with another
                                                               prefill ``PhaseConfig`` in ``get_exec().graph``; the
                                                               ``PrefillCudaGraphRunner`` it makes is used as it is
``disaggregation.common.conn.CommonKVManager``                 hooked, ``check_status``, ``update_status``,
                                                               ``__init__`` (its ``transfer_infos``): see
                                                               ``transfers.py`` (enabled, or no GPU)
``managers.scheduler.Scheduler``                               hooked, ``init_model_worker``, ``get_internal_state``:
                                                               see ``emulation/`` (emulated devices only)
``layers.attention.torch_native_backend``                      ``_run_sdpa_forward_extend`` of its instances replaced
                                                               (emulated devices only)
``platforms.cpu.CpuDeviceMixin``, ``interface.SRTPlatform``    subclassed, see ``host_platform.py`` (no GPU only)
``layers.attention.torch_native_backend``                      subclassed under its own name, see ``host/attention.py``
                                                               (no GPU only)
``disaggregation.mooncake.conn.MooncakeKVSender``,             one attribute of each set, see ``host/corrections.py``
``layers.dp_attention``, ``model_executor.``                   (no GPU only)
``forward_batch_info``, ``models.qwen2_moe``,
``layers.logits_processor``, ``speculative.draft_utils``,
``lora.layers``, ``lora.backend.torch_backend``
``mem_cache.memory_pool.MHATokenToKVPool``                     subclassed, see ``host/pool.py`` (no GPU only)
``AttentionBackendRegistry`` of DeepSeek's models              one handler registered (no GPU only)
=============================================================  ====================================================
"""

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

from sglang_laps import graphs, options, saved_model, transfers
from sglang_laps.emulation import asked
from sglang_laps.emulation.install import install
from sglang_laps.pool import PoolCell
from sglang_laps.support import conflict, off_reason, refuse, resolved, wrong_release

logger = logging.getLogger(__name__)

SERVER_ARGS = "sglang.srt.server_args"
RESOLVE = f"{SERVER_ARGS}.ServerArgs.resolve_once"
SCHEDULER = "sglang.srt.managers.scheduler"
HTTP_APP_ENV = "SGLANG_HTTP_SERVER_APP_PATH"
HTTP_APP = "sglang_laps.http_app:app"
NO_HOST = "devices are emulated on machines without a GPU only, on the platform laps_host"


def load() -> None:
    """Entry point of the group ``sglang.srt.plugins``; runs once in every SGLang process."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{SERVER_ARGS}.ServerArgs.add_cli_args", _add_cli_args, HookType.AROUND)
    HookRegistry.register(f"{SERVER_ARGS}.ServerArgs.from_cli_args", _from_cli_args, HookType.AROUND)
    try:
        config = options.from_env()
    except ConfigError as e:
        refuse(e)
    if config is not None:
        HookRegistry.register(RESOLVE, _refuse_conflict, HookType.AFTER)
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
    HookRegistry.register(f"{SCHEDULER}.Scheduler", scheduler_class(stock, config), HookType.REPLACE)
    transfers.be_patient()
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
    if wrong := wrong_release() or off_reason(args) or (None if _on_host() else NO_HOST):
        raise ConfigError(f"{asked.FLAG}: {wrong}")
    logger.warning(found.warning())
    asked.to_env(found)


def enable(args: argparse.Namespace) -> None:
    """Turn LAPS on for the processes started from here, if the command line (or the environment) asks for it.

    Raises ConfigError. Warns once, and leaves LAPS off, where it has nothing to do.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

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
    if reason := off_reason(args):
        logger.warning("LAPS scheduler is off: %s.", reason)
        os.environ.pop(options.ENV, None)
        return
    if wrong := wrong_release() or conflict(args):
        raise ConfigError(f"{options.ENABLE}: {wrong}")
    known = saved_model.load(config.profile_path).fitted  # a bad file is refused here, before any model loads
    options.to_env(config)
    HookRegistry.register(RESOLVE, _refuse_conflict, HookType.AFTER)
    HookRegistry.apply_hooks()
    if config.profile and not known:
        args.warmups = ",".join(filter(None, (args.warmups, "laps_profile")))
    logger.info("LAPS scheduler on: %s", ", ".join(f"{k}={v}" for k, v in config.as_dict().items()))
    os.environ.setdefault(HTTP_APP_ENV, HTTP_APP)  # for --tokenizer-worker-num > 1: each worker imports it by name
    PoolCell.make()
    import sglang_laps.http_app  # noqa: F401  (adds the routes)


def _refuse_conflict(_: None, server_args: Any) -> None:
    """After ``ServerArgs.resolve_once``: not all that matters is typed."""
    args = resolved(server_args)
    if off_reason(args) is None and (reason := conflict(args)):
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
