"""Every knob of the router extension: its default, its unit and its check.

Four come as flags of their own (see ``FLAGS``); the rest go into ``--laps-alloc-config '{...}'``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

from laps_core.config import ConfigError, read_knobs
from laps_core.pools.pressure import PressureConfig

JSON_FLAG = "--laps-alloc-config"
SPILLS = ("auto", "off", "short", "both")

FLAGS: dict[str, str] = {
    "threshold": "--laps-alloc-threshold",
    "interval_s": "--laps-rebalance-interval-s",
    "ratio": "--laps-rebalance-ratio",
    "tokenizer": "--laps-tokenizer",
}
"""Knobs that are flags of their own."""

RETIRED: dict[str, str] = {
    **dict.fromkeys(
        ("alpha", "beta", "gamma", "deviation_cap", "quantile", "idle_pressure", "recovering", "prefix_tokens",
         "prefix_load_factor", "exact_bytes", "image_tokens", "connect_timeout_s", "history_s"),
        "has one value for all",
    ),
    **dict.fromkeys(("backlog_unit", "spill_tokens"), "is load_unit"),
    **dict.fromkeys(("cooldown_s", "signal_period_s"), "follows --laps-rebalance-interval-s"),
    **dict.fromkeys(("probe_backoff_s", "probe_backoff_max_s"), "follows --health-check-interval-secs"),
    "max_inflight": "is --max-concurrent-requests",
}  # fmt: skip
"""Names that are no knobs, each with what to set in its place or why there is nothing to set."""


@dataclass(frozen=True, kw_only=True)
class AllocConfig:
    """Validated knobs of one router. Raises ConfigError on a bad value."""

    threshold: int = 256
    """Longest short request (expected new tokens, inclusive)."""
    interval_s: float = 5.0
    """Control period: how often the pools are reconsidered (seconds)."""
    ratio: float = 2.0
    """How many times the other pool's pressure calls for a move."""
    tokenizer: str | None = None
    """A tokenizer.json, or the folder that holds one; None = estimate tokens from bytes."""

    load_unit: int = 2048
    """What makes a server one time full (new tokens): so much backlog is pressure 1, and a pool is overloaded when each
    of its servers has more than this in flight."""
    spill: str = "auto"
    """Which class may use the other pool when its own is overloaded: off, short, both; auto: short ones, and long ones
    where the instance runs LAPS and parks them while short ones run."""
    n_min: int = 1
    """Healthy instances each pool keeps."""
    initial_short: int | None = None
    """Short instances at the start; None = half, rounded down."""
    keep_alive_s: float = 75.0
    """How long an idle connection of a client stays open (seconds). Longer than the 60 s after which load balancers
    close theirs: who closes first may close on a request that is under way."""

    def __post_init__(self) -> None:
        for name in ("threshold", "load_unit", "n_min", "initial_short"):
            value = getattr(self, name)
            if not (value is None and name == "initial_short"):
                _check(name, value, isinstance(value, int) and value >= 1, "a whole number >= 1")
        for name, low in (("interval_s", 0.0), ("keep_alive_s", 0.0), ("ratio", 1.0)):
            value = getattr(self, name)
            good = isinstance(value, (int, float)) and low < value < math.inf
            _check(name, value, good, f"a number > {low:g}")
        _check("spill", self.spill, self.spill in SPILLS, f"one of {', '.join(SPILLS)}")
        path = self.tokenizer
        _check("tokenizer", path, path is None or (isinstance(path, str) and path != ""), "a path")

    @property
    def pressure(self) -> PressureConfig:
        """What the pool controller goes by."""
        return PressureConfig(ratio=self.ratio, period_s=self.interval_s, load_unit=self.load_unit, n_min=self.n_min)

    @classmethod
    def parse(cls, given: dict[str, Any], extra: str | None = None) -> AllocConfig:
        """Build from flag values (by knob name) and the text of ``--laps-alloc-config``.

        A knob named by both is refused: it has no one value.
        """
        more = read_knobs(JSON_FLAG, extra, {f.name for f in fields(cls)}, given, FLAGS, RETIRED)
        return cls(**{**given, **more})

    def check_instances(self, prefill: int) -> None:
        """Raise ConfigError when ``prefill`` instances cannot fill two pools."""
        n_min = self.n_min
        if 2 * n_min > prefill:
            raise ConfigError(f"{_shown('n_min')}: {n_min} for each pool needs {2 * n_min} --prefill, not {prefill}")
        if self.initial_short is not None and not n_min <= self.initial_short <= prefill - n_min:
            raise ConfigError(
                f"{_shown('initial_short')}: {self.initial_short} is not from {n_min} to {prefill - n_min}, "
                f"what {prefill} --prefill and n_min {n_min} allow"
            )


def _shown(name: str) -> str:
    return FLAGS.get(name, f"{JSON_FLAG}: {name}")


def _check(name: str, value: Any, good: bool, wanted: str) -> None:
    if not good or isinstance(value, bool):
        raise ConfigError(f"{_shown(name)}: {value!r} is not {wanted}")
