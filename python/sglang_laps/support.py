"""Conditions under which LAPS can run: the server arguments.

``args`` is the parsed command line, or the arguments as SGLang resolves them (``resolved``): models, platforms and
environment variables change arguments after parsing, and SGLang's record keeps the typed values.
"""

from __future__ import annotations

import sys
from typing import Any, NoReturn

from sglang_laps import compat

DRAFTS = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE")
"""Speculative algorithms whose steps run in pauses. NEXTN is a typed value: SGLang replaces it with EAGLE, or with what
the model needs."""
LAYERS = "--enable-multi-layer-eagle"
"""Flag for drafts in which each token comes from a layer of its own. SGLang sets it itself for some models."""


def several_ranks(args: Any) -> bool:
    """Return True if these server arguments ask for data-parallel attention ranks."""
    return bool(getattr(args, "enable_dp_attention", None)) or (getattr(args, "attn_dp_size", None) or 1) > 1


def resolved(server_args: Any) -> Any:
    """Return the server arguments as SGLang acts on them."""
    from sglang.srt.arg_groups.overrides import resolved_view

    return resolved_view(server_args)


def no_prefill_server(args: Any) -> str | None:
    """Return why these are not the arguments of a prefill server, or None."""
    mode = args.disaggregation_mode or "null"
    return None if mode == "prefill" else f"--disaggregation-mode is {mode}, not prefill"


def off_reason(args: Any) -> str | None:
    """Return why LAPS has nothing to do under these server arguments, or None."""
    if args.disaggregation_mode == "decode":
        return no_prefill_server(args)
    return None if args.disaggregation_mode == "prefill" else _not_colocated(args)


def _not_colocated(args: Any) -> str | None:
    """Return which argument LAPS does not support yet without disaggregation, or None."""

    def has(name: str) -> bool:
        return bool(getattr(args, name, None))

    together, drafts = several_ranks(args), getattr(args, "speculative_algorithm", None)
    checks = (
        (drafts and not compat.release().drafts_in_pauses, f"speculative decoding on SGLang {compat.installed()}"),
        (drafts and drafts not in DRAFTS, f"speculative decoding with {drafts}"),
        (drafts and together and has("enable_multi_layer_eagle"), f"{LAYERS} with data-parallel attention"),
        (drafts and has("speculative_use_rejection_sampling"), "--speculative-use-rejection-sampling"),
        (getattr(args, "pp_size", 1) > 1, "--pp-size > 1"),
        (together and has("prefill_decode_interval"), "--prefill-decode-interval with data-parallel attention"),
        (has("enable_pdmux"), "--enable-pdmux"),
        (has("dllm_algorithm"), "--dllm-algorithm"),
        (has("enable_hisparse"), "--enable-hisparse"),
        (has("enable_lmcache"), "--enable-lmcache"),
        (has("enable_flexkv"), "--enable-flexkv"),
        (has("enable_prefill_delayer"), "--enable-prefill-delayer (or SGLANG_SCHEDULER_DECREASE_PREFILL_IDLE)"),
        (has("enable_pd_role_switch"), "--enable-pd-role-switch"),
    )
    return next((f"{what}: not supported without disaggregation" for hit, what in checks if hit), None)


def conflict(args: Any) -> str | None:
    """Return a feature that cannot be combined with LAPS, or None."""
    checks = (
        # The delayer counts one attempt per round on every data-parallel rank; LAPS can make two.
        (args.enable_prefill_delayer, "--enable-prefill-delayer (or SGLANG_SCHEDULER_DECREASE_PREFILL_IDLE)"),
        # SGLang sorts the requests that a later stage receives: the plan of one group would go to all groups.
        (args.pp_size > 1 and args.attn_dp_size > 1, "data-parallel attention with --pp-size > 1"),
        # LAPS gives chunks equal time itself, and counts the short requests that share a step.
        (args.pp_size > 1 and args.enable_dynamic_chunking, "--enable-dynamic-chunking"),
        (args.dllm_algorithm, "--dllm-algorithm"),
        # A role switch creates a new scheduler: batches and learned state would stay behind.
        (args.enable_pd_role_switch, "--enable-pd-role-switch"),
    )
    return next((f"{what} cannot be combined with it" for hit, what in checks if hit), None)


def refuse(reason: object) -> NoReturn:
    """End this process with exit code 2 and one line."""
    print(f"sglang-laps: error: {reason}", file=sys.stderr, flush=True)
    raise SystemExit(2)
