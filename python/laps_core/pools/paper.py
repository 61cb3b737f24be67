"""The router of the LAPS paper, as a baseline.

The class of a request depends on its whole prompt, and the server with the fewest requests gets the request. Algorithm
2 decides by the pressures alone and makes at most one move per period (LAPS, s3.2).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from laps_core.length import classify
from laps_core.pools.arrivals import MOST_WORK_S
from laps_core.pools.choice import Choice, Pools, Why
from laps_core.pools.config import AllocConfig
from laps_core.pools.controller import Move, PoolController, other
from laps_core.pools.instances import Clock, open_to
from laps_core.pools.prefill import PrefillInstance
from laps_core.pools.prefixes import Ask
from laps_core.pools.pressure import BOTH, POOLS


class PaperController(PoolController):
    """Controller without smoothing or measured work: it uses the pools' pressures at the moment of a decision."""

    def decide(self, now: float) -> list[Move]:
        if self._seen_at is None or now - self._moved_at < self.config.cooldown_s:
            return []
        moves = self._divide([s for s in self._healthy if s.pool == BOTH], now, "it belongs to no pool yet")
        for target in POOLS:
            source, members = other(target), self._members[other(target)]
            if moves or len(members) <= self.config.n_min:
                continue
            if self.raw[target] > self.config.ratio * self.raw[source]:
                chosen = min(members, key=lambda s: (s.outstanding, s.name))
                reason = f"pressure {self.raw[target]:.2f} on the {target} pool, {self.raw[source]:.2f} on the other"
                moves = [Move(chosen.name, source, target, now, reason)]
        if moves:
            self.moved(now)
        return moves


class PaperPools(Pools):
    """Pools that ignore prefixes, history and predicted times."""

    def choose(self, ask: Ask, avoid: Collection[PrefillInstance] = ()) -> Choice | None:
        """Choose the place with the fewest requests, as ``Pools.choose``."""
        usable, total = open_to(self.instances, avoid), max(1, ask.total)
        if not usable:
            return None
        length_class = classify(total, self.config.threshold)
        own = [i for i in usable if i.pool in (length_class, BOTH)]
        places = [place for i in own or usable for place in i.places]
        chosen = min(places, key=lambda p: (p.outstanding, p.outstanding_tokens, p.served_tokens))
        work_s = min(chosen.outlook.model.work_s(total, 0), MOST_WORK_S)
        why: Why = "pool" if own else "spill"
        return Choice(chosen.server, length_class, total, 0, work_s, rank=chosen.rank, why=why)

    def record_choice(self, ask: Ask, choice: Choice) -> None:
        """Record nothing: prefixes and sessions are ignored."""


def controller(config: AllocConfig, start_s: float = 0.0) -> PoolController:
    return (PoolController if config.preset is None else PaperController)(config, start_s)


def pools(servers: Any, config: AllocConfig, clock: Clock, **more: Any) -> Pools:
    """Return the pools that ``config`` asks for; other arguments as for ``Pools``."""
    return (Pools if config.preset is None else PaperPools)(servers, config, clock, **more)
