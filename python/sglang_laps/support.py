"""Where LAPS can run: with which release of SGLang, and under which server arguments.

``args`` is the command line as parsed, or what SGLang has made of it (``resolved``): models, platforms and
environment variables change arguments after parsing, and the record itself keeps what was typed.
"""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Any, NoReturn

from laps_core import __version__

SGLANG = "0.5.23"
"""The release whose seams are used here."""


def wrong_release() -> str | None:
    """Why the installed SGLang cannot be extended, or None."""
    found = version("sglang")
    return None if found == SGLANG else f"sglang-laps {__version__} supports sglang {SGLANG}; found {found}"


def resolved(server_args: Any) -> Any:
    """A record of server arguments as SGLang acts on them."""
    from sglang.srt.arg_groups.overrides import resolved_view

    return resolved_view(server_args)


def off_reason(args: Any) -> str | None:
    """Why LAPS has nothing to do under these server arguments, or None."""
    if args.disaggregation_mode != "prefill":
        return f"--disaggregation-mode is {args.disaggregation_mode or 'null'}, not prefill"
    return None


def conflict(args: Any) -> str | None:
    """A feature that cannot be combined with LAPS, or None."""
    checks = (
        # It counts one attempt a round on every data-parallel rank; a dual queue may make two.
        (args.enable_prefill_delayer, "--enable-prefill-delayer (or SGLANG_SCHEDULER_DECREASE_PREFILL_IDLE)"),
        # SGLang sorts what a later stage receives: a plan of one group would go to all of them.
        (args.pp_size > 1 and args.attn_dp_size > 1, "data-parallel attention with --pp-size > 1"),
        # The same is done here, and short requests that share a step count.
        (args.pp_size > 1 and args.enable_dynamic_chunking, "--enable-dynamic-chunking"),
        (args.dllm_algorithm, "--dllm-algorithm"),
        # It makes the scheduler anew for the other role; batches, and what was learnt, stay behind.
        (args.enable_pd_role_switch, "--enable-pd-role-switch"),
    )
    return next((f"{what} cannot be combined with it" for hit, what in checks if hit), None)


def refuse(reason: object) -> NoReturn:
    """End this process with exit code 2 and one line."""
    print(f"sglang-laps: error: {reason}", file=sys.stderr, flush=True)
    raise SystemExit(2)
