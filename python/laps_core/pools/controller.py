"""The controller that moves prefill instances between the two pools (LAPS, s3.2, Alg. 2).

Why it does not oscillate: what is compared is the short pool's share of the two pool pressures, smoothed with the
time constant ``cooldown / ln(ratio)`` from one half, at the start and again after each move. A load that swings
evenly between the pools with a full period of at most one cool-down never leaves the dead band, whatever its
amplitude: the smoothed pressures stay within 2 sqrt(ratio) - 1 <= ratio of each other. Slower swings are followed,
at one move per cool-down.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from laps_core.pools.pressure import (
    IDLE_PRESSURE,
    POOLS,
    InstanceSignals,
    Pool,
    PressureConfig,
    pool_pressure,
    pressure,
)
from laps_core.protocol import LONG, SHORT

RECOVERING = 0.9
"""A pool whose recent pressure is below this share of its longer mean is working its backlog off: no move to it."""


def other(pool: Pool) -> Pool:
    """The pool across."""
    return LONG if pool == SHORT else SHORT


@dataclass(frozen=True, slots=True)
class Move:
    """One instance changes pools."""

    name: str
    source: Pool
    target: Pool
    at: float
    """Controller time (seconds)."""
    reason: str


def _faded(mean: float, value: float, seconds: float, constant_s: float) -> float:
    """An exponential mean with this time constant, after ``value`` was the value for so long."""
    return value + (mean - value) * math.exp(-seconds / constant_s)


class PoolController:
    """Algorithm 2 with smoothing, a dead band and a cool-down: one for the router and for its simulation.

    Holds no instances: membership is the caller's. All times are the caller's too (seconds).
    """

    def __init__(self, config: PressureConfig, start_s: float = 0.0) -> None:
        """The first decision comes a period after ``start_s``."""
        self.config = config
        self.raw: dict[Pool, float] = {"short": 0.0, "long": 0.0}
        """Last observed pool pressures."""
        self.balance = 0.5
        """The short pool's smoothed share of both pressures (0..1): what decisions are made on."""
        self._recent, self._longer = dict(self.raw), dict(self.raw)
        """Two means of the pool pressures."""
        self._healthy: dict[Pool, list[InstanceSignals]] = {"short": [], "long": []}
        self._seen_at: float | None = None
        self._moved_at: float | None = None
        self._decide_at = start_s + config.period_s

    def step(self, now: float, signals: Iterable[InstanceSignals]) -> Move | None:
        """One beat: take the signals in, and decide once each control period. The caller carries the move out."""
        self.observe(now, signals)
        period_s = self.config.period_s
        # Half a sample of tolerance: a decision belongs to the beat nearest to it.
        if now + self.config.sample_s / 2 < self._decide_at:
            return None
        # Beats that were left out move the grid; those that were late do not.
        self._decide_at = max(self._decide_at, now - period_s / 2) + period_s
        return self.decide(now)

    def observe(self, now: float, signals: Iterable[InstanceSignals]) -> None:
        """Take in the signals of all prefill instances at ``now``. Time never runs backwards here."""
        if self._seen_at is None:
            self._seen_at = self._moved_at = now
        # The last share held until now: weigh that one, not the one that has just begun.
        span = max(0.0, now - self._seen_at)
        constant_s = self.config.smoothing_s
        self.balance = _faded(self.balance, self._share(), span, constant_s)
        for p in POOLS:
            self._recent[p] = _faded(self._recent[p], self.raw[p], span, constant_s / 4)
            self._longer[p] = _faded(self._longer[p], self.raw[p], span, constant_s)
        self._seen_at = max(now, self._seen_at)

        healthy = [s for s in signals if s.healthy]
        self._healthy = {p: [s for s in healthy if s.pool == p] for p in POOLS}
        self.raw = {p: pool_pressure([pressure(s, self.config) for s in self._healthy[p]], self.config) for p in POOLS}

    def decide(self, now: float) -> Move | None:
        """At most one move, or None. The cool-down starts whether it is carried out or not."""
        if self._moved_at is None or now - self._moved_at < self.config.cooldown_s:
            return None
        starving = (p for p in POOLS if len(self._healthy[p]) < self.config.n_min)
        target = next(starving, None) or self._wanting()
        if target is None:
            return None
        source = other(target)
        donors = self._healthy[source]
        if len(donors) <= self.config.n_min:
            # A long wait for what cannot be done must not delay the answer to the next change.
            self.balance = min(max(self.balance, 1 - self._edge()), self._edge())
            return None
        chosen = min(donors, key=lambda s: (s.outstanding, s.name))
        move = Move(chosen.name, source, target, now, self._reason(target))
        self._moved_at = now
        # What was smoothed over the old pools must not call for the next move as well.
        self.balance = 0.5
        return move

    def in_dead_band(self) -> bool:
        """Whether the smoothed pressures call for no move."""
        return self._wanting() is None

    def _edge(self) -> float:
        """Share at which one pool's pressure is ``ratio`` times the other's."""
        return self.config.ratio / (1 + self.config.ratio)

    def _share(self) -> float:
        if max(self.raw.values()) <= IDLE_PRESSURE:
            return 0.5
        return self.raw["short"] / (self.raw["short"] + self.raw["long"])

    def _wanting(self) -> Pool | None:
        shares: tuple[tuple[Pool, float], ...] = (("short", self.balance), ("long", 1 - self.balance))
        for target, share in shares:
            if share > self._edge():
                recovers = self._recent[target] < RECOVERING * self._longer[target]
                return target if self._would_help(target, share) and not recovers else None
        return None

    def _would_help(self, target: Pool, share: float) -> bool:
        """Whether one more instance leaves the pools closer than they are: with few instances the grain is coarse."""
        n_target, n_source = len(self._healthy[target]), len(self._healthy[other(target)])
        odds = share**2 * n_target * max(1, n_source - 1)
        return odds > (1 - share) ** 2 * (n_target + 1) * n_source

    def _reason(self, target: Pool) -> str:
        healthy = len(self._healthy[target])
        if healthy < self.config.n_min:
            return f"{target} pool has {healthy} healthy instances, fewer than {self.config.n_min}"
        share = self.balance if target == "short" else 1 - self.balance
        return (
            f"{target} pool has {share:.0%} of the pressure, more than {self._edge():.0%} "
            f"(now {self.raw[target]:.3g} against {self.raw[other(target)]:.3g})"
        )
