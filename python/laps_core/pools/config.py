"""Knobs of the router: defaults, units and valid ranges.

Four knobs have flags of their own; the rest go into ``--laps-alloc-config '{...}'``.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from laps_core.config import ConfigError, Knobs, Path

Whole = Annotated[int, Meta(ge=1, description="a whole number >= 1")]
Seconds = Annotated[float, Meta(gt=0.0, le=sys.float_info.max, description="a number > 0")]
Period = Annotated[float, Meta(ge=0.1, le=sys.float_info.max, description="a number >= 0.1")]
Ratio = Annotated[float, Meta(gt=1.0, le=sys.float_info.max, description="a number > 1")]

COOLDOWN_SHARE = 0.9
"""Cool-down as a share of the period (0..1): less than 1, so that timer jitter never skips a decision."""
BEATS = 5
"""Number of samples in each period: enough for smoothing, with few polls of the servers."""


@dataclass(frozen=True, kw_only=True)
class AllocConfig(Knobs):
    """Validated knobs of one router. Raises ConfigError on a bad value."""

    preset: Literal["paper"] | None = None
    """"paper": the router of the LAPS paper, as a baseline."""
    threshold: Whole = 256
    """Longest short request (expected new tokens, inclusive)."""
    interval_s: Period = 5.0
    """Control period: time between rebalancing decisions (seconds)."""
    ratio: Ratio = 2.0
    """Ratio of the pools' pressures from which an instance moves (1 + tau); also the half-width of the dead band."""
    tokenizer: Path | None = None
    """A tokenizer.json, or the folder that holds one; None = estimate tokens from bytes."""

    load_unit: Whole = 2048
    """Backlog of a server at pressure 1 (new tokens); a pool is overloaded when each of its servers has more in
    flight."""
    spill: Literal["auto", "off", "short", "both"] = "auto"
    """Classes that may use the other pool when their own is overloaded: off, short, both; auto: short, and also long to
    instances that run LAPS (they park long prompts while short ones run)."""
    n_min: Whole = 1
    """Least number of healthy instances in each pool."""
    initial_short: Whole | None = None
    """Short instances at the start, in a fleet that stays divided; None = the controller decides whether to divide the
    fleet."""
    keep_alive_s: Seconds = 75.0
    """Time for which an idle client connection stays open (seconds). Longer than the 60 s of common load balancers: if
    the router closed a connection first, a new request could already be on its way."""

    JSON_FLAG = "--laps-alloc-config"
    FLAGS: ClassVar[Mapping[str, str]] = {
        "threshold": "--laps-alloc-threshold",
        "interval_s": "--laps-rebalance-interval-s",
        "ratio": "--laps-rebalance-ratio",
        "tokenizer": "--laps-tokenizer",
    }

    @property
    def sample_s(self) -> float:
        """Return the time between two samples of the signals (seconds)."""
        return self.interval_s / BEATS

    @property
    def cooldown_s(self) -> float:
        """Return T_cool, the least time between two moves (seconds)."""
        return COOLDOWN_SHARE * self.interval_s

    @property
    def smoothing_s(self) -> float:
        """Return the time constant of the smoothed pool pressures (seconds)."""
        return self.cooldown_s / math.log(self.ratio)

    @property
    def divided(self) -> bool:
        """Return True if the fleet is divided from the start and stays divided."""
        return self.initial_short is not None or self.preset is not None

    def short_of(self, servers: int) -> int | None:
        """Return the number of short instances among ``servers`` at the start; None if the fleet starts undivided."""
        return servers // 2 if self.divided and self.initial_short is None else self.initial_short

    def check_instances(self, prefill: int) -> None:
        """Raise ConfigError if two pools are required and ``prefill`` instances cannot fill them."""
        n_min = self.n_min
        if 2 * n_min > prefill and (n_min > 1 or self.divided):
            raise ConfigError(
                f"{self.display_name('n_min')}: {n_min} for each pool needs {2 * n_min} --prefill, not {prefill}"
            )
        if self.initial_short is not None and not n_min <= self.initial_short <= prefill - n_min:
            raise ConfigError(
                f"{self.display_name('initial_short')}: {self.initial_short} must be from {n_min} to {prefill - n_min} "
                f"with {prefill} --prefill and n_min {n_min}"
            )
