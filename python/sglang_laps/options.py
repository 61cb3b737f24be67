"""LAPS's command-line flags, and the way of their values to the scheduler processes."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from laps_core.config import ConfigError, LapsConfig

from sglang_laps.support import refuse

ENV = "SGLANG_LAPS_SCHEDULER"
"""Environment variable. The launcher sets it from the flags, ``sgl.Engine`` users by hand; each scheduler reads it.

The value is the JSON text of the knobs, or 1 for all defaults."""

ENABLE = "--enable-laps-scheduler"
LONGEST = "--batch-prefill-max-seq-len"
PIECEWISE = "--enable-piecewise-cuda-graph"
_FLAG = LapsConfig.FLAGS
OF_KNOBS = (*_FLAG.values(), LapsConfig.JSON_FLAG, LONGEST)
_SWITCHES = (
    (ENABLE, "Prefill short and long prompts separately."),
    (_FLAG["graphs"], "Replay batched short prefills from full CUDA graphs."),
    (PIECEWISE, "Accepted and ignored: SGLang's default prefill graphs cover it."),
)
_VALUES = (
    (_FLAG["length_threshold"], "TOKENS",
     "Longest short request, in new tokens (default: 256); auto takes it from the fitted latency model."),
    (_FLAG["length_basis"], "{uncached,prompt}",
     "Tokens that count: those not found in the prefix cache, or the whole prompt (default: uncached)."),
    (_FLAG["wait_window_ms"], "MS",
     "Longest time that a short batch is held (default: 10.0); 0 = never held."),
    (_FLAG["wait_max_batch"], "REQUESTS", "A short batch of this many requests leaves at once (default: 8)."),
    (_FLAG["ttft_slo_ms"], "SHORT[,LONG]",
     "Deadline for the first token of requests without one of their own, in ms (default: no deadlines)."),
    (_FLAG["tbt_ms"], "MS",
     "Without disaggregation: target for the time between tokens while prompts wait, in ms (default: four times what a "
     "decode step takes, at least 50); 0 = prompts always go first."),
    (LapsConfig.JSON_FLAG, "JSON", "Any other knob, as a JSON object; see docs/LAPS.md."),
    (LONGEST, "TOKENS", "Drop lengths above this from L."),
)  # fmt: skip
_LISTS = (
    (_FLAG["graph_lengths"], "TOKENS",
     "L: the largest is the most new tokens of a request in a graph; L x B are row counts (default: 8 to 256)."),
    (_FLAG["graph_batches"], "REQUESTS",
     "B: the largest is the most requests of a batch in a graph (default: 1 to 64, powers of two)."),
)  # fmt: skip


def with_flags(add: Callable[[argparse.ArgumentParser], None]) -> Callable[..., None]:
    """Return a hook that calls `add` after SGLang's ``add_cli_args``."""

    def add_cli_args(_: Any, parser: argparse.ArgumentParser) -> None:
        add(parser)

    return add_cli_args


def read_first(use: Callable[[argparse.Namespace], None]) -> Callable[..., None]:
    """Return a hook that calls `use` with the command line before SGLang's ``from_cli_args``. A ConfigError of `use`
    ends the process with one line."""

    def from_cli_args(_: type, args: argparse.Namespace) -> None:
        try:
            use(args)
        except ConfigError as e:
            refuse(e)

    return from_cli_args


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the group "LAPS". Values stay text here, so that a bad value is refused in one line, without usage text."""
    group = parser.add_argument_group("LAPS", "Length-aware prefill scheduling (all servers but decode servers)")
    for flag, text in _SWITCHES:
        group.add_argument(flag, action="store_true", help=text)
    for flag, metavar, text in _VALUES:
        group.add_argument(flag, metavar=metavar, help=text)
    for flag, metavar, text in _LISTS:
        group.add_argument(flag, metavar=metavar, nargs="+", help=text)


def typed(args: argparse.Namespace, flag: str) -> Any:
    """Return the value of this flag on the command line; None if the flag is absent."""
    value = getattr(args, flag[2:].replace("-", "_"), None)
    return None if value is False else value


def given(args: argparse.Namespace) -> dict[str, Any]:
    """Return the knobs whose flags are on this command line, each with a text, a list of texts, or True."""
    values = {knob: typed(args, flag) for knob, flag in _FLAG.items()}
    split = {k: [n for t in v for n in t.split(",") if n] if isinstance(v, list) else v for k, v in values.items()}
    both = (values["ttft_slo_ms"] or "").split(",")
    if len(both) > 1 and all(both):
        split["ttft_slo_ms"] = both
    return {knob: value for knob, value in split.items() if value is not None}


def from_args(args: argparse.Namespace) -> LapsConfig:
    """Return the configuration on this command line. Raises ConfigError."""
    config = LapsConfig.parse(given(args), typed(args, LapsConfig.JSON_FLAG))
    longest = typed(args, LONGEST)
    if longest is None:
        return config
    kept = tuple(n for n in config.graph_lengths if longest.isdecimal() and n <= int(longest))
    if not kept:
        raise ConfigError(f"{LONGEST}: {longest} leaves no length of {', '.join(map(str, config.graph_lengths))}")
    return replace(config, graph_lengths=kept)


def from_env(env: Mapping[str, str] = os.environ) -> LapsConfig | None:
    """Return the configuration in the environment, or None if LAPS is off there. Raises ConfigError."""
    text = env.get(ENV, "").strip()
    if text in ("", "0"):
        return None
    try:
        return LapsConfig.parse({}, None if text == "1" else text)
    except ConfigError as e:
        raise ConfigError(f"{ENV}: {e}") from None


def to_env(config: LapsConfig) -> None:
    """Hand the configuration to the processes started from here."""
    os.environ[ENV] = json.dumps(config.as_dict())
