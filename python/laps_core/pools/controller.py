"""The controller that moves prefill instances between the two pools [L s3.2, Alg. 2].

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


class _Trend:
    """Two exponential means of one value that is held between samples: one recent, one longer."""

    def __init__(self, recent_s: float, longer_s: float) -> None:
        self._spans = (recent_s, longer_s)
        self.recent = self.longer = 0.0

    def hold(self, value: float, seconds: float) -> None:
        """``value`` was the value for ``seconds``."""
        keep_recent, keep_longer = (math.exp(-seconds / span) for span in self._spans)
        self.recent = value + (self.recent - value) * keep_recent
        self.longer = value + (self.longer - value) * keep_longer


class PoolController:
    """Algorithm 2 with smoothing, a dead band and a cool-down. Holds no instances: membership is the caller's.

    Call ``observe`` as often as signals come, several times per decision, and ``decide`` every control period.
    """

    def __init__(self, config: PressureConfig) -> None:
        self.config = config
        self.raw: dict[Pool, float] = {"short": 0.0, "long": 0.0}
        """Last observed pool pressures."""
        self.balance = 0.5
        """The short pool's smoothed share of both pressures (0..1): what decisions are made on."""
        self._trend = {p: _Trend(config.smoothing_s / 4, config.smoothing_s) for p in POOLS}
        self._signals: tuple[InstanceSignals, ...] = ()
        self._seen_at: float | None = None
        self._moved_at: float | None = None

    def observe(self, now: float, signals: Iterable[InstanceSignals]) -> None:
        """Take in the signals of all prefill instances at ``now`` (seconds). Time never runs backwards here."""
        if self._seen_at is None:
            self._seen_at = self._moved_at = now
        # The last share held until now: weigh that one, not the one that has just begun.
        span = max(0.0, now - self._seen_at)
        held = self._share()
        self.balance = held + (self.balance - held) * math.exp(-span / self.config.smoothing_s)
        for p in POOLS:
            self._trend[p].hold(self.raw[p], span)
        self._seen_at = max(now, self._seen_at)

        self._signals = tuple(signals)
        values: dict[Pool, list[float]] = {"short": [], "long": []}
        for s in self._signals:
            if s.healthy:
                values[s.pool].append(pressure(s, self.config))
        self.raw = {p: pool_pressure(values[p], self.config) for p in POOLS}

    def decide(self, now: float) -> Move | None:
        """At most one move, or None. The caller carries the move out; the cool-down starts either way."""
        if self._moved_at is None or now - self._moved_at < self.config.cooldown_s:
            return None
        target = self._pool_in_need()
        if target is None:
            return None
        source = other(target)
        donors = [s for s in self._signals if s.pool == source and s.healthy]
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

    def _healthy(self, pool: Pool) -> int:
        return sum(1 for s in self._signals if s.healthy and s.pool == pool)

    def _pool_in_need(self) -> Pool | None:
        for p in POOLS:
            if self._healthy(p) < self.config.n_min:
                return p
        return self._wanting()

    def _wanting(self) -> Pool | None:
        shares: tuple[tuple[Pool, float], ...] = (("short", self.balance), ("long", 1 - self.balance))
        for target, share in shares:
            if share > self._edge():
                trend = self._trend[target]
                recovers = trend.recent < RECOVERING * trend.longer
                return target if self._would_help(target, share) and not recovers else None
        return None

    def _would_help(self, target: Pool, share: float) -> bool:
        """Whether one more instance leaves the pools closer than they are: with few instances the grain is coarse."""
        n_target, n_source = self._healthy(target), self._healthy(other(target))
        odds = share**2 * n_target * max(1, n_source - 1)
        return odds > (1 - share) ** 2 * (n_target + 1) * n_source

    def _reason(self, target: Pool) -> str:
        if self._healthy(target) < self.config.n_min:
            return f"{target} pool has {self._healthy(target)} healthy instances, fewer than {self.config.n_min}"
        share = self.balance if target == "short" else 1 - self.balance
        return (
            f"{target} pool has {share:.0%} of the pressure, more than {self._edge():.0%} "
            f"(now {self.raw[target]:.3g} against {self.raw[other(target)]:.3g})"
        )
