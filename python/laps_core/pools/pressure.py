"""How much prefill work presses on an instance, and on a pool (LAPS, s3.2, Alg. 2)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from laps_core.protocol import CLASSES, IDLE, ClassName, Load
from laps_core.slo import OVERSHOOT_MAX

Pool = ClassName
POOLS: tuple[Pool, Pool] = CLASSES


ALPHA = 1.0
"""Weight of the backlog: what waits counts once."""
BETA = 1.0
"""Weight of the deviation: a server that answers at twice the deadline presses as much as one load waiting there."""
GAMMA = 0.2
"""Weight of the busy share, which lowers pressure: a backlog on a busy device is already being worked off. Small, or a
busy server with a short queue would seem to need nothing."""
QUANTILE = 0.9
"""Which quantile over its instances is a pool's pressure: the hot ones, and of many not the hottest alone."""
IDLE_PRESSURE = 0.25
"""With both pools below this there is nothing to even out, whatever the ratio."""
COOLDOWN_SHARE = 0.9
"""Of a period, so that a timer's jitter never skips a decision."""
BEATS = 5
"""Samples of the signals in each period: enough to smooth them, and few questions to the servers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PressureConfig:
    """What operators set of Algorithm 2; the rest follows from it."""

    ratio: float = 2.0
    """1 + tau: how many times the other pool's pressure calls for a move; also the half-width of the dead band."""
    period_s: float = 5.0
    """Time between decisions (seconds)."""
    load_unit: int = 2048
    """Backlog that counts as pressure 1 (tokens)."""
    n_min: int = 1
    """Healthy instances each pool keeps."""

    @property
    def sample_s(self) -> float:
        """Time between two samples of the signals (seconds)."""
        return self.period_s / BEATS

    @property
    def cooldown_s(self) -> float:
        """T_cool: least time between two moves (seconds)."""
        return COOLDOWN_SHARE * self.period_s

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
    """psi_k = alpha q_k + beta e_k - gamma u_k on normalised signals, never below 0 (LAPS, s3.2).

    The floor at 0 keeps ratios of pressures meaningful: an idle instance is not "less than idle" for being busy.
    """
    q = max(0.0, signals.load.backlog_tokens) / config.load_unit
    e = min(max(0.0, signals.load.slo_deviation), OVERSHOOT_MAX)
    u = min(max(0.0, signals.load.busy_share), 1.0)
    return max(0.0, ALPHA * q + BETA * e - GAMMA * u)


def pool_pressure(values: Sequence[float], config: PressureConfig) -> float:
    """A pool's pressure: the QUANTILE over its instances; 0.0 for none.

    One instance counts at most ``ratio`` times the mean of the others, or IDLE_PRESSURE if that is more. Of a few
    instances the P90 is nearly the largest: a single sick one, whose backlog does not move, would otherwise draw the
    other pool's instances over one by one. So bounded it cannot call for a move while the others of its pool are under
    no more pressure than the other pool.
    """
    if len(values) > 1:
        total, others = sum(values), len(values) - 1
        values = [min(v, max(IDLE_PRESSURE, config.ratio * (total - v) / others)) for v in values]
    return quantile(values, QUANTILE)


def quantile(values: Sequence[float], q: float) -> float:
    """The q-quantile of ``values`` with linear interpolation; 0.0 for none."""
    return float(np.quantile(values, q)) if len(values) else 0.0
