"""Algorithm 2 as published, as a baseline: by the pressures alone, at most one move a period (LAPS, s3.2)."""

from __future__ import annotations

from laps_core.pools.controller import Move, PoolController, other
from laps_core.pools.pressure import BOTH, POOLS, PressureConfig


class PaperController(PoolController):
    """Controller without smoothing or measured work: uses the pools' pressures at the moment of a decision."""

    def decide(self, now: float) -> list[Move]:
        """See PoolController."""
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


def controller(config: PressureConfig, start_s: float = 0.0) -> PoolController:
    """Return the controller that ``config`` asks for."""
    return (PaperController if config.published else PoolController)(config, start_s)
