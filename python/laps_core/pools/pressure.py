"""How much prefill work presses on an instance, and on a pool [L s3.2, Alg. 2]."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from laps_core.config import ConfigError
from laps_core.protocol import CLASSES, IDLE, ClassName, Load
from laps_core.slo import OVERSHOOT_MAX

Pool = ClassName
POOLS: tuple[Pool, Pool] = CLASSES


@dataclass(frozen=True, kw_only=True)
class PressureConfig:
    """Weights and limits of Algorithm 2. Raises ConfigError on a bad value."""

    alpha: float = 1.0
    """Weight of the backlog."""
    beta: float = 1.0
    """Weight of the SLO deviation."""
    gamma: float = 0.2
    """Weight of the busy share, which lowers pressure: a backlog on a busy device is already being worked off."""
    backlog_unit: float = 2048.0
    """Backlog that counts as pressure 1 (tokens)."""
    deviation_cap: float = OVERSHOOT_MAX
    """Relative SLO overshoot beyond which an instance is simply late (ratio). LAPS servers report no more than that."""
    quantile: float = 0.9
    """Which quantile over its instances is a pool's pressure (0..1)."""
    ratio: float = 2.0
    """1 + tau: how many times the other pool's pressure calls for a move; also the half-width of the dead band."""
    idle_pressure: float = 0.25
    """With both pools below this there is nothing to even out, whatever the ratio."""
    recovering: float = 0.9
    """A pool whose recent pressure is below this share of its longer mean is working its backlog off: no move to it."""
    cooldown_s: float = 4.5
    """T_cool: least time between two moves (seconds)."""
    n_min: int = 1
    """Healthy instances each pool keeps."""

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                raise ConfigError(f"{f.name}: {value!r} is not a finite number")
        for name in ("alpha", "beta", "gamma", "idle_pressure", "recovering"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}: {getattr(self, name)!r} is not a number >= 0")
        for name in ("backlog_unit", "deviation_cap", "cooldown_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name}: {getattr(self, name)!r} is not a number > 0")
        if not 0 <= self.quantile <= 1:
            raise ConfigError(f"quantile: {self.quantile!r} is not from 0 to 1")
        if self.ratio <= 1:
            raise ConfigError(f"ratio: {self.ratio!r} is not a number > 1")
        if not isinstance(self.n_min, int) or self.n_min < 1:
            raise ConfigError(f"n_min: {self.n_min!r} is not a whole number of instances >= 1")

    @property
    def smoothing_s(self) -> float:
        """Time constant of the smoothed pool pressures (seconds)."""
        return self.cooldown_s / math.log(self.ratio)


@dataclass(frozen=True, kw_only=True, slots=True)
class InstanceSignals:
    """What is known of one prefill instance at one moment."""

    name: str
    pool: Pool
    healthy: bool = True
    load: Load = IDLE
    outstanding: float = 0.0
    """Work in flight (tokens): the least of it makes the cheapest instance to move."""


def pressure(signals: InstanceSignals, config: PressureConfig) -> float:
    """psi_k = alpha q_k + beta e_k - gamma u_k on normalised signals, never below 0 [L s3.2].

    The floor at 0 keeps ratios of pressures meaningful: an idle instance is not "less than idle" for being busy.
    """
    q = max(0.0, signals.load.backlog_tokens) / config.backlog_unit
    e = min(max(0.0, signals.load.slo_deviation), config.deviation_cap)
    u = min(max(0.0, signals.load.busy_share), 1.0)
    return max(0.0, config.alpha * q + config.beta * e - config.gamma * u)


def pool_pressure(values: Sequence[float], config: PressureConfig) -> float:
    """A pool's pressure: the configured quantile over its instances; 0.0 for none.

    One instance counts at most ``ratio`` times the mean of the others, or ``idle_pressure`` if that is more. Of a few
    instances the P90 is nearly the largest: a single sick one, whose backlog does not move, would otherwise draw the
    other pool's instances over one by one. So bounded it cannot call for a move while the others of its pool are under
    no more pressure than the other pool.
    """
    if len(values) > 1:
        total, others = sum(values), len(values) - 1
        values = [min(v, max(config.idle_pressure, config.ratio * (total - v) / others)) for v in values]
    return quantile(values, config.quantile)


def quantile(values: Sequence[float], q: float) -> float:
    """The q-quantile of ``values`` with linear interpolation; 0.0 for none."""
    return float(np.quantile(values, q)) if len(values) else 0.0
