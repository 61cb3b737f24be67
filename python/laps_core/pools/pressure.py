"""How much prefill work presses on an instance, and on a pool (LAPS, s3.2, Alg. 2)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from laps_core.length import CLASSES, ClassName
from laps_core.protocol import IDLE, Assignment, Load
from laps_core.slo import OVERSHOOT_MAX

Pool = ClassName
POOLS: tuple[Pool, Pool] = CLASSES
BOTH: Final[Literal["both"]] = "both"


class Work(NamedTuple):
    """Of each class."""

    short: float = 0.0
    long: float = 0.0


NO_WORK = Work()

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
    divided: bool = False
    """There are two pools whatever is measured; else the controller decides whether there are."""
    published: bool = False
    """Algorithm 2 as it was published, a baseline; see paper.py."""

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
    pool: Assignment
    healthy: bool = True
    load: Load = IDLE
    outstanding: float = 0.0
    """Work in flight (tokens): the least of it makes the cheapest instance to move."""
    busy: Work = NO_WORK
    """Share of the time since the last sample that the device spent on each class (0..1)."""
    came: Work | None = None
    """Predicted work that came since the last sample (servers; see ``Arrivals``); None: not known."""
    waiting: Work = NO_WORK
    """Work that waits there (seconds)."""
    parks: bool = False
    """It is known to run LAPS, which parks long prefills while short ones run."""


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
    return quantile(bounded(values, config.ratio, IDLE_PRESSURE), QUANTILE)


def bounded(values: Sequence[float], ratio: float, least: float) -> Sequence[float]:
    """Each at most ``ratio`` times the mean of the others, or ``least`` if that is more."""
    if len(values) < 2:
        return values
    total, others = sum(values), len(values) - 1
    return [min(v, max(least, ratio * (total - v) / others)) for v in values]


def quantile(values: Sequence[float], q: float) -> float:
    """The q-quantile of ``values`` with linear interpolation; 0.0 for none."""
    # NumPy's takes ten times as long for a pool's handful, and a simulation asks for it at every step.
    if not len(values):
        return 0.0
    ordered = sorted(values)
    below, share = divmod(q * (len(ordered) - 1), 1.0)
    low, high = ordered[int(below)], ordered[min(int(below) + 1, len(ordered) - 1)]
    return float(low + share * (high - low))
