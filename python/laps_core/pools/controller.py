"""Controller that moves prefill instances between the two pools (LAPS, s3.2, Alg. 2), and divides or merges them.

The controller does not oscillate. It compares the short pool's share of the two pool pressures, smoothed with the time
constant ``cooldown / ln(ratio)``. Smoothing starts from one half at the start, after each move and at a change of the
work. A load that swings evenly between the pools, with a full period of at most one cool-down, never leaves the dead
band, no matter how large: the smoothed pressures stay within 2 sqrt(ratio) - 1 <= ratio of each other. The controller
follows slower swings, with one decision per cool-down. The measured work gives the number of instances to move, because
queues do not tell how many servers are missing. A correction below the error of the measurement, or with little gain,
is not made.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from laps_core.length import LONG, SHORT
from laps_core.pools.config import AllocConfig
from laps_core.pools.demand import Demand
from laps_core.pools.layout import layout, short_servers
from laps_core.pools.pressure import BOTH, IDLE_PRESSURE, POOLS, InstanceSignals, Pool, Work, pool_pressure, pressure
from laps_core.protocol import Assignment

RECOVERING = 0.9
"""Share of a pool's longer mean pressure (0..1): a pool with a lower recent mean gets servers only if overloaded."""
LEAST_GAIN = 1.25
"""Ratio of the busier pool's load now to the busier pool's load after the best split, above which servers move."""
FULL, LEAST_GAIN_FULL = 0.9, 1.1
"""Load from which a pool is nearly full (0..1), and the value that then replaces LEAST_GAIN."""
SETTLED = 1.99
"""Age of the measured work from which a pool also gives up servers that its uncertain work may need (periods)."""
LAYOUT_PERIODS = 4
"""Averaging time of the work for dividing or merging a fleet, and least time between two such changes (control
periods)."""


def other(pool: Pool) -> Pool:
    return LONG if pool == SHORT else SHORT


@dataclass(frozen=True, slots=True)
class Move:
    """Move of one instance from one pool to another."""

    name: str
    source: Assignment
    target: Assignment
    at: float
    """Controller time (seconds)."""
    reason: str


def _faded(mean: float, value: float, seconds: float, constant_s: float) -> float:
    """Return the exponential ``mean`` (time constant ``constant_s``) after ``value`` has lasted for ``seconds``."""
    return value + (mean - value) * math.exp(-seconds / constant_s)


class PoolController:
    """Algorithm 2 with smoothing, a dead band and a cool-down, for the router and its simulation.

    Holds no instances: the caller keeps the members of the pools and the time (seconds).
    """

    def __init__(self, config: AllocConfig, start_s: float = 0.0) -> None:
        """Start at ``start_s``; the first decision is made one period later."""
        self.config = config
        self.raw: dict[Pool, float] = {"short": 0.0, "long": 0.0}
        """Last observed pool pressures."""
        self.balance = 0.5
        """Smoothed share of the short pool in both pressures (0..1); decisions are based on this."""
        self.need = Work()
        """Servers that each class needs, measured since the work last changed."""
        self._demand = Demand(config)
        self.average_work = Work()
        """Arriving work of each class, averaged over LAYOUT_PERIODS (servers)."""
        self._recent, self._longer = dict(self.raw), dict(self.raw)
        """Means of the pool pressures, over a short and a longer time."""
        self._healthy: list[InstanceSignals] = []
        self._members: dict[Pool, list[InstanceSignals]] = {"short": [], "long": []}
        self._seen_at: float | None = None
        self._moved_at = self._laid_out_at = start_s
        self._decide_at = start_s + config.interval_s
        self._hurry_until = -math.inf
        """Time until which every sample leads to a decision (seconds)."""
        self._shares: deque[tuple[float, float]] = deque()
        """Recent shares of the short pool in both pressures: (end time, share)."""

    def step(self, now: float, signals: Iterable[InstanceSignals]) -> list[Move]:
        """Take in one sample, and decide if a decision is due. Returns the moves for the caller to carry out."""
        self.observe(now, signals)
        period_s = self.config.interval_s
        # The tolerance of half a sample assigns each decision to the nearest sample.
        half_s = self.config.sample_s / 2
        if now + half_s < self._decide_at:
            return self.decide(now) if now <= self._hurry_until + half_s else []
        # Skipped samples shift the times of later decisions; late samples do not.
        self._decide_at = max(self._decide_at, now - period_s / 2) + period_s
        return self.decide(now)

    def observe(self, now: float, signals: Iterable[InstanceSignals]) -> None:
        """Take in the signals of all prefill instances at ``now``. An earlier ``now`` counts as no time passed."""
        if self._seen_at is None:
            self._seen_at = self._moved_at = self._laid_out_at = now
        # The last share lasted until now, so it enters the mean; the new share starts only now.
        span = max(0.0, now - self._seen_at)
        constant_s = self.config.smoothing_s
        self.balance = _faded(self.balance, self._share(), span, constant_s)
        self._shares.append((now, self._share()))
        while now - self._shares[0][0] > LAYOUT_PERIODS * self.config.interval_s:
            self._shares.popleft()
        for p in POOLS:
            self._recent[p] = _faded(self._recent[p], self.raw[p], span, constant_s / 4)
            self._longer[p] = _faded(self._longer[p], self.raw[p], span, constant_s)
        self._seen_at = max(now, self._seen_at)

        self._healthy = [s for s in signals if s.healthy]
        self._members = {p: [s for s in self._healthy if s.pool in (p, BOTH)] for p in POOLS}
        self.raw = {p: pool_pressure([pressure(s, self.config) for s in self._members[p]], self.config) for p in POOLS}
        arrived = self._demand.observe(now, self._healthy)
        if self._demand.drop_before_change():
            # Pressures before the change say nothing about the new work; decide as soon as the new work is clear.
            self.balance, at = 0.5, now - self._demand.span_s
            for seen_at, share in self._shares:
                self.balance = _faded(self.balance, share, max(0.0, seen_at - at), constant_s)
                at = max(at, seen_at)
            self._hurry_until = now - self._demand.span_s + 3 * self.config.interval_s
        self.need = self._demand.servers()
        # While this machine stands still nothing arrives: such a time must not count as one with little work.
        counted_s, over_s = min(span, 2.0 * self.config.sample_s), LAYOUT_PERIODS * self.config.interval_s
        means = (_faded(mean, value, counted_s, over_s) for mean, value in zip(self.average_work, arrived, strict=True))
        self.average_work = Work(*means)

    def decide(self, now: float) -> list[Move]:
        """Return the moves that are due; the caller may skip any of them. Between two decisions with moves lies at
        least one cool-down."""
        if self._seen_at is None or now - self._moved_at < self.config.cooldown_s:
            return []
        moves = self._lay_out(now) or self._even_out(now)
        if moves:
            self.moved(now)
        else:
            # A long time without a possible move must not delay the reaction to the next change.
            self.balance = min(max(self.balance, 1 - self._edge()), self._edge())
        return moves

    def moved(self, now: float, *, laid_out: bool = False) -> None:
        """Start the cool-down after a move by any router; ``laid_out``: it may have divided or merged the fleet."""
        self._moved_at = now
        self._laid_out_at = now if laid_out else self._laid_out_at
        # Pressures smoothed over the old pools must not cause the next move.
        self.balance = 0.5

    def in_dead_band(self) -> bool:
        """Return True if no server should move from one pool to the other."""
        return self._pool_in_need() is None

    # -- dividing and merging the fleet

    def _lay_out(self, now: float) -> list[Move]:
        """Return moves that divide or merge the fleet, or that make single instances follow the present layout."""
        n, n_min, everyone = len(self._healthy), self.config.n_min, self._healthy
        undivided = [s for s in everyone if s.pool == BOTH]
        divided = len(undivided) * 2 < n
        stray = undivided if divided else [s for s in everyone if s.pool != BOTH]
        if n < 2 * n_min:
            return []
        if self.config.divided:
            return self._divide(undivided, now, "it belongs to no pool yet")
        if now - self._laid_out_at < LAYOUT_PERIODS * self.config.interval_s:
            return []
        parks = all(s.parks for s in everyone)
        short, reason = layout(self.average_work, n, n_min, parks=parks, divided=divided)
        if (short is not None) == divided and not stray:
            return []
        self._laid_out_at = now
        if short is not None:
            return self._divide(undivided, now, f"divided: {reason}")
        return [Move(s.name, s.pool, BOTH, now, f"merged: {reason}") for s in everyone if s.pool != BOTH]

    def _divide(self, undivided: Sequence[InstanceSignals], now: float, reason: str) -> list[Move]:
        """Return moves of ``undivided`` into the pools; those with the least long work go to the short pool."""
        if not undivided:
            return []
        wanted = short_servers(self.average_work, len(self._healthy), self.config.n_min)
        short = max(0, wanted - sum(s.pool == SHORT for s in self._healthy))
        free = sorted(undivided, key=lambda s: (s.waiting.long, s.outstanding, s.name))
        return [Move(s.name, BOTH, SHORT if i < short else LONG, now, reason) for i, s in enumerate(free)]

    # -- moves from pool to pool

    def _even_out(self, now: float) -> list[Move]:
        """Return moves into the pool that has too few instances, as many as are missing."""
        if any(s.pool == BOTH for s in self._healthy):
            return []
        n_min = self.config.n_min
        starving = next((p for p in POOLS if len(self._members[p]) < n_min), None)
        target = starving or self._pool_in_need()
        if target is None:
            return []
        source = other(target)
        donors = sorted(self._members[source], key=lambda s: (s.outstanding, s.name))
        if len(donors) <= n_min:
            return []
        missing = n_min - len(self._members[target]) if starving else self._servers_to_move(target)
        # An instance that stays busy with old work would not help its new pool.
        able = [s for s in donors if sum(s.waiting) <= self.config.interval_s] or donors[:1]
        chosen = able[: min(missing, len(donors) - n_min)]
        return [Move(s.name, source, target, now, self._reason(target)) for s in chosen]

    def _edge(self) -> float:
        """Return the share at which one pool's pressure is ``ratio`` times the other's."""
        return self.config.ratio / (1 + self.config.ratio)

    def _share(self) -> float:
        if max(self.raw.values()) <= IDLE_PRESSURE:
            return 0.5
        return self.raw["short"] / (self.raw["short"] + self.raw["long"])

    def _pool_in_need(self) -> Pool | None:
        shares: tuple[tuple[Pool, float], ...] = (("short", self.balance), ("long", 1 - self.balance))
        for target, share in shares:
            if self._servers_to_move(target) > 0:
                recovers = self._recent[target] < RECOVERING * self._longer[target]
                if (share > self._edge() and not recovers) or self._overloaded(target):
                    return target
        return None

    def _overloaded(self, pool: Pool) -> bool:
        """Return True if ``pool`` certainly gets more work than it can do, measured over at least a full period."""
        i = POOLS.index(pool)
        sure = self.need[i] - self._demand.error()[i]
        return sure > len(self._members[pool]) and self._demand.span_s >= 0.99 * self.config.interval_s

    def _servers_to_move(self, target: Pool) -> int:
        """Return the number of instances to move to ``target`` so that the busier pool is least busy with the measured
        work; 0 if the gain is small."""
        source = other(target)
        have, rest = len(self._members[target]), len(self._members[source])
        wants, spares = (self.need[POOLS.index(p)] for p in (target, source))
        if not have or rest < 2:
            return int(wants > 0.0 and not have)

        def busier(moved: int, wants: float = wants) -> float:
            return max(wants / (have + moved), spares / (rest - moved))

        # Uncertain work of the target brings in no server. At first, servers that the source may need stay.
        doubt, source_doubt = (self._demand.error()[POOLS.index(p)] for p in (target, source))
        best, sure = min(range(rest), key=busier), max(0.0, wants - doubt)
        before, after = busier(0, sure), busier(best, sure)
        if before <= (LEAST_GAIN_FULL if before >= FULL else LEAST_GAIN) * after:
            return 0
        needed = int(source_doubt / busier(best)) if self._demand.span_s < SETTLED * self.config.interval_s else 0
        return max(0, best - needed)

    def _reason(self, target: Pool) -> str:
        have = len(self._members[target])
        if have < self.config.n_min:
            return f"{target} pool has {have} healthy instances, fewer than {self.config.n_min}"
        share = self.balance if target == "short" else 1 - self.balance
        return (
            f"{target} work needs {self.need[POOLS.index(target)]:.1f} servers and has {have}; "
            f"{share:.0%} of the pressure is there, more than {self._edge():.0%}"
        )
