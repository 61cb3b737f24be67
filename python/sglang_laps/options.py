"""The LAPS flags of the prefill server, and how their values reach its scheduler processes."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from laps_core.config import AUTO, ConfigError, LapsConfig

ENV = "SGLANG_LAPS_SCHEDULER"
"""Set by the launcher from the flags, read in every scheduler process; ``sgl.Engine`` users set it themselves.

The value is the JSON text of the knobs, or 1 for all defaults."""

ENABLE = "--enable-laps-scheduler"
_FIELDS: dict[str, type] = {
    "length_threshold": int,
    "length_basis": str,
    "wait_window_ms": float,
    "wait_max_batch": int,
    "ttft_slo_ms": float,
}
"""LapsConfig fields that are flags of their own, and how their text is read."""

GRAPHS = "--enable-batch-prefill-cuda-graph"
LONGEST = "--batch-prefill-max-seq-len"
PIECEWISE = "--enable-piecewise-cuda-graph"
_GRAPH_FIELDS = {
    "batch_prefill_seq_lengths": "graph_lengths",
    "batch_prefill_batch_sizes": "graph_batches",
}
"""Flags of the prefill graphs -> LapsConfig fields."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the group "LAPS". Values stay text here: a bad one is refused in one line, not below a page of usage."""
    group = parser.add_argument_group("LAPS", "Length-aware prefill scheduling (prefill servers only)")
    group.add_argument(ENABLE, action="store_true", help="Prefill short and long prompts apart.")
    group.add_argument(
        "--laps-length-threshold",
        metavar="TOKENS",
        help="Longest short request, in new tokens (default: 256); auto takes it from the fitted latency model.",
    )
    group.add_argument(
        "--laps-length-basis",
        metavar="{uncached,prompt}",
        help="What counts: tokens not found in the prefix cache, or the whole prompt (default: uncached).",
    )
    group.add_argument(
        "--laps-wait-window-ms",
        metavar="MS",
        help="Longest wait for a short batch to fill (default: 5.0); 0 = never wait, dual queue only.",
    )
    group.add_argument(
        "--laps-wait-max-batch", metavar="REQUESTS", help="Short batch that is never held back for more (default: 8)."
    )
    group.add_argument(
        "--laps-ttft-slo-ms",
        metavar="MS",
        help="Deadline for the first token of a request that brings none of its own (default: no deadlines).",
    )
    group.add_argument("--laps-config", metavar="JSON", help="Any other knob, as a JSON object; see docs/LAPS.md.")
    group.add_argument(GRAPHS, action="store_true", help="Replay batched short prefills from full CUDA graphs.")
    group.add_argument(
        "--batch-prefill-seq-lengths",
        nargs="+",
        metavar="TOKENS",
        help="L: the longest is the longest prompt for graphs, and L x B are their row counts (default: 8 to 256).",
    )
    group.add_argument(
        "--batch-prefill-batch-sizes",
        nargs="+",
        metavar="REQUESTS",
        help="B: the largest is the largest batch for graphs (default: 1 to 64, by powers of two as L).",
    )
    group.add_argument(LONGEST, metavar="TOKENS", help="Lengths beyond this are left out of L.")
    group.add_argument(
        PIECEWISE, action="store_true", help="Accepted and ignored: SGLang's default prefill graphs cover it."
    )


def graph_flags(args: argparse.Namespace) -> dict[str, Any]:
    """LapsConfig fields that the flags of the prefill graphs set on this command line."""
    values: dict[str, Any] = {"graphs": True} if getattr(args, GRAPHS[2:].replace("-", "_"), False) else {}
    for flag, name in _GRAPH_FIELDS.items():
        text = getattr(args, flag, None)
        if text is not None:
            values[name] = _numbers(text)
    return values


def _within(longest: str | None, config: LapsConfig) -> LapsConfig:
    """Without the lengths of L beyond --batch-prefill-max-seq-len (tokens). Raises ConfigError."""
    if longest is None:
        return config
    kept = tuple(n for n in config.graph_lengths if longest.isdecimal() and n <= int(longest))
    if not kept:
        raise ConfigError(f"{LONGEST}: {longest} leaves no length of {', '.join(map(str, config.graph_lengths))}")
    return replace(config, graph_lengths=kept)


def _numbers(texts: Sequence[str]) -> list[Any]:
    return [_number(part) for text in texts for part in text.split(",") if part]


def _number(text: str) -> Any:
    return int(text) if text.isdecimal() else text  # refused by the field's own check, which names the flag


def given(args: argparse.Namespace) -> dict[str, str]:
    """LAPS flags with a value on this command line: field (or ``config``) -> text."""
    names = [*_FIELDS, "config"]
    values = {name: getattr(args, f"laps_{name}", None) for name in names}
    return {name: text for name, text in values.items() if text is not None}


def from_args(args: argparse.Namespace) -> LapsConfig:
    """The configuration on this command line. Raises ConfigError."""
    texts = given(args)
    extra = texts.pop("config", None)
    values = {name: _read(name, text) for name, text in texts.items()} | graph_flags(args)
    return _within(getattr(args, "batch_prefill_max_seq_len", None), LapsConfig.parse(values, extra))


def _read(name: str, text: str) -> Any:
    kind = _FIELDS[name]
    if kind is str or text == AUTO:
        return text
    try:
        return kind(text)
    except ValueError:
        return text  # refused by the field's own check, which names the flag


def from_env(env: Mapping[str, str] = os.environ) -> LapsConfig | None:
    """The configuration in the environment, None where there is none. Raises ConfigError."""
    text = env.get(ENV, "").strip()
    if text in ("", "0"):
        return None
    if text == "1":
        return LapsConfig()
    try:
        return LapsConfig.parse({}, text)
    except ConfigError as e:
        raise ConfigError(f"{ENV}: {e}") from None


def to_env(config: LapsConfig) -> None:
    """Hand the configuration to the processes started from here."""
    os.environ[ENV] = json.dumps(config.as_dict())
