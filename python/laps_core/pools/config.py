"""Knobs of the router: defaults, units and valid ranges.

Four knobs have flags of their own; the rest go into ``--laps-alloc-config '{...}'``.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from laps_core.config import ConfigError, Knobs, Path
from laps_core.pools.pressure import PressureConfig

Whole = Annotated[int, Meta(ge=1, description="a whole number >= 1")]
Seconds = Annotated[float, Meta(gt=0.0, le=sys.float_info.max, description="a number > 0")]
Ratio = Annotated[float, Meta(gt=1.0, le=sys.float_info.max, description="a number > 1")]


@dataclass(frozen=True, kw_only=True)
class AllocConfig(Knobs):
    """Validated knobs of one router. Raises ConfigError on a bad value."""

    preset: Literal["paper"] | None = None
    """"paper": the router of the LAPS paper, as a baseline."""
    threshold: Whole = 256
    """Longest short request (expected new tokens, inclusive)."""
    interval_s: Seconds = 5.0
    """Control period: time between rebalancing decisions (seconds)."""
    ratio: Ratio = 2.0
    """Ratio of the pools' pressures from which an instance moves."""
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
    def pressure(self) -> PressureConfig:
        """Return the pool controller's configuration."""
        return PressureConfig(
            ratio=self.ratio,
            period_s=self.interval_s,
            load_unit=self.load_unit,
            n_min=self.n_min,
            divided=self.divided,
            published=self.preset is not None,
        )

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
