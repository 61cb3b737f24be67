"""Entry points from SGLang into LAPS. ``seams`` lists every SGLang name that LAPS touches."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from typing import Any

from laps_core.config import ConfigError, LapsConfig

from sglang_laps import compat, graphs, options, penalties, saved_model, seams, sessions, transfers
from sglang_laps.http import answering
from sglang_laps.http.pool import PoolCell
from sglang_laps.seams import wrong_release
from sglang_laps.support import conflict, no_prefill_server, off_reason, refuse, resolved, several_ranks
from sglang_laps.telemetry import moments

logger = logging.getLogger(__name__)

RESOLVE = "server_args.ServerArgs.resolve_once"
SCHEDULER = "sglang.srt.managers.scheduler"
TOKENIZER = "sglang.srt.managers.tokenizer_manager"
HTTP_APP_ENV = "SGLANG_HTTP_SERVER_APP_PATH"
HTTP_APP = "sglang_laps.http.app:app"


def load() -> None:
    """Load LAPS: entry point of the group ``sglang.srt.plugins``, called once in every SGLang process."""
    try:
        _load()
    except Exception as e:
        # SGLang would log the error and serve without LAPS.
        if os.environ.get(options.ENV, "0").strip() not in ("", "0"):
            refuse(f"{options.ENV}: {type(e).__name__}: {e}")
        raise


def _load() -> None:
    seams.hook("server_args.ServerArgs.add_cli_args", options.with_flags(options.add_flags), "AFTER")
    seams.hook("server_args.ServerArgs.from_cli_args", options.read_first(enable), "BEFORE")
    try:
        config = options.from_env()
    except ConfigError as e:
        refuse(e)
    if config is not None:
        seams.hook(RESOLVE, _refuse_conflict, "AFTER")
    # Importing the scheduler takes seconds. Only a process that runs a scheduler has already imported it.
    if config is None or SCHEDULER not in sys.modules:
        return
    if wrong := wrong_release():
        refuse(wrong)
    seams.require()
    from sglang_laps import beams
    from sglang_laps.checks import control, lora_fit
    from sglang_laps.scheduler import scheduler_class

    stock = sys.modules[SCHEDULER].Scheduler
    seams.hook("managers.scheduler.Scheduler", scheduler_class(stock, config), "REPLACE")
    transfers.hook_races()
    transfers.set_environment()
    seams.hook(penalties.COUNT, penalties.count, "AROUND")
    seams.hook(sessions.CLOSE, sessions.close_when_encoded, "AROUND")
    seams.hook(sessions.CREATE, sessions.replace_all_if_asked, "BEFORE")
    seams.hook(sessions.CREATE, sessions.set_apart_if_refused, "AFTER")
    seams.hook(sessions.CLEAR, sessions.clear, "AROUND")
    control.hook_scheduler()
    lora_fit.hook()
    seams.hook(beams.RELEASE, beams.free_rows, "BEFORE")
    graphs.install(config)
    if config.receipts:
        moments.hook_senders()
        moments.hook_scheduler()
    if TOKENIZER in sys.modules:  # imported by an Engine, which has no HTTP server
        from sglang_laps.checks import prompts

        prompts.hook()
        if config.receipts:
            answering.hook()


def enable(args: argparse.Namespace) -> None:
    """Turn LAPS on for the processes started from here, if the command line (or the environment) asks for it.

    Raises ConfigError. Warns once and leaves LAPS off on a server where LAPS has nothing to do.
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
    if wrong := _conflict_of_processes(args):
        raise ConfigError(wrong)
    if config.graphs and not prefills:
        raise ConfigError(f"{LapsConfig.FLAGS['graphs']}: for prefill servers only")
    if reason is None and several_ranks(args) and not args.disable_overlap_schedule:
        # The overlap loop decides on a step while another runs, which delays all ranks by a whole step.
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
    if reason is None and (other := _other_server(args)):
        logger.warning("LAPS with %s: no routes, receipts, profile at start and checks of requests.", other)
    os.environ.setdefault(HTTP_APP_ENV, HTTP_APP)  # for --tokenizer-worker-num > 1: each worker imports it by name
    PoolCell.make()
    import sglang_laps.http.app  # noqa: F401  (adds the routes)


def _conflict_of_processes(args: argparse.Namespace) -> str | None:
    """Return why several HTTP processes are refused, or None."""
    if args.tokenizer_worker_num == 1:
        return None
    if not compat.release().takes_http_app:
        return f"--tokenizer-worker-num: only 1 on SGLang {compat.installed()}, whose other HTTP processes lack LAPS"
    return "--admin-api-key: SGLang checks it only with --tokenizer-worker-num 1" if args.admin_api_key else None


def _other_server(args: argparse.Namespace) -> str | None:
    """Return what makes SGLang answer clients by a server that LAPS does not extend, or None."""
    from sglang.srt.environ import envs

    in_rust: Any = getattr(envs, "SGLANG_RUST_SERVER", None)
    if in_rust is not None and in_rust.get():
        return "SGLANG_RUST_SERVER"
    grpc = getattr(args, "smg_grpc_mode", False) or getattr(args, "grpc_mode", False)
    return "--smg-grpc-mode" if grpc else None


def _refuse_conflict(_: None, server_args: Any) -> None:
    """Refuse conflicts after ``ServerArgs.resolve_once``, because SGLang derives some settings only there."""
    args = resolved(server_args)
    if no_prefill_server(args) is None and (reason := conflict(args)):
        refuse(f"{options.ENABLE}: {reason}")
