"""Pressure of prefill work on an instance, and on a pool (LAPS, s3.2, Alg. 2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from laps_core.length import CLASSES, ClassName
from laps_core.pools.config import AllocConfig
from laps_core.protocol import IDLE, Assignment, Load
from laps_core.slo import OVERSHOOT_MAX

Pool = ClassName
POOLS: tuple[Pool, Pool] = CLASSES
BOTH: Final[Literal["both"]] = "both"


class Work(NamedTuple):
    """One value per class."""

    short: float = 0.0
    long: float = 0.0


NO_WORK = Work()

ALPHA = 1.0
"""Weight of the backlog."""
BETA = 1.0
"""Weight of the deviation: a server that answers at twice the deadline has as much pressure as with one ``load_unit``
of backlog."""
GAMMA = 0.2
"""Weight of the busy share, which lowers pressure: a busy device already works on its backlog. A large weight would
hide the need of a busy server with a short queue."""
QUANTILE = 0.9
"""Quantile of the instances' pressures that is the pool's pressure: high, but not the hottest instance alone."""
IDLE_PRESSURE = 0.25
"""Pressure up to which both pools count as idle, no matter how large their ratio is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InstanceSignals:
    """State of one prefill instance at one moment."""

    name: str
    pool: Assignment
    healthy: bool = True
    load: Load = IDLE
    outstanding: float = 0.0
    """Work in flight (tokens); the instance with the least work is the cheapest to move."""
    busy: Work = NO_WORK
    """Share of the time since the last sample that the device spent on each class (0..1)."""
    arrived: Work | None = None
    """Predicted work that arrived since the last sample (servers; see ``Arrivals``); None if unknown."""
    waiting: Work = NO_WORK
    """Unfinished work at the instance, by class (seconds)."""
    parks: bool = False
    """True if the server runs LAPS, which parks long prefills while short ones run."""


def pressure(signals: InstanceSignals, config: AllocConfig) -> float:
    """Return psi_k = alpha q_k + beta e_k - gamma u_k on normalised signals, never below 0 (LAPS, s3.2).

    The floor at 0 keeps ratios of pressures meaningful: the busy share cannot make a pressure negative.
    """
    q = max(0.0, signals.load.backlog_tokens) / config.load_unit
    e = min(max(0.0, signals.load.slo_deviation), OVERSHOOT_MAX)
    u = min(max(0.0, signals.load.busy_share), 1.0)
    return max(0.0, ALPHA * q + BETA * e - GAMMA * u)


def pool_pressure(values: Sequence[float], config: AllocConfig) -> float:
    """Return a pool's pressure: the QUANTILE over its instances; 0.0 for an empty pool.

    Each instance counts at most ``ratio`` times the mean of the other instances, or IDLE_PRESSURE if that is more. With
    few instances the P90 is nearly the largest value. Without the bound a single faulty instance, whose backlog does
    not shrink, would draw in the other pool's instances one by one. With it the faulty instance cannot cause a move
    while the other instances of its pool have no more pressure than the other pool.
    """
    return quantile(bounded(values, config.ratio, IDLE_PRESSURE), QUANTILE)


def bounded(values: Sequence[float], ratio: float, least: float) -> Sequence[float]:
    """Return ``values``, each bounded by ``ratio`` times the mean of the others, or by ``least`` if that is more."""
    if len(values) < 2:
        return values
    total, others = sum(values), len(values) - 1
    return [min(v, max(least, ratio * (total - v) / others)) for v in values]


def quantile(values: Sequence[float], q: float) -> float:
    """Return the q-quantile of ``values`` with linear interpolation; 0.0 without values."""
    # NumPy's quantile takes ten times as long for a few values, and a simulation computes one at every step.
    if not len(values):
        return 0.0
    ordered = sorted(values)
    below, share = divmod(q * (len(ordered) - 1), 1.0)
    low, high = ordered[int(below)], ordered[min(int(below) + 1, len(ordered) - 1)]
    return float(low + share * (high - low))
