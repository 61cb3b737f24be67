"""The background task that reads signals and lets the controller move servers between the pools."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from laps_core.pools.pressure import Move, Pool, PoolController

from ..config import AllocConfig
from ..servers.instances import Clock, PrefillInstance
from ..servers.signals import SignalReader
from .choice import Pools

logger = logging.getLogger(__name__)

Note = Callable[[float, Sequence[PrefillInstance], dict[Pool, float], Move | None], None]
"""Told of each beat: its time (seconds), the servers, the pressure of each pool, and the move, if there is one."""


class Control:
    """Algorithm 2 over live instances. ``run`` ends when cancelled."""

    def __init__(
        self,
        pools: Pools,
        readers: Sequence[SignalReader],
        config: AllocConfig,
        note: Note,
        clock: Clock = time.monotonic,
    ) -> None:
        self.controller = PoolController(config.pressure)
        self._readers = readers
        self._pools = pools
        self._config = config
        self._note = note
        self._clock = clock
        self._decide_at = clock() + config.interval_s

    async def run(self) -> None:
        """Sample on a fixed grid, decide every control period."""
        at = self._clock()
        while True:
            await self.step()
            at += self._config.sample_s
            now = self._clock()
            if at <= now:
                # Too late for a beat: leave it out rather than run after it.
                at = now + self._config.sample_s
            await asyncio.sleep(at - now)

    async def step(self) -> None:
        """One sample, and a decision when one is due."""
        await asyncio.gather(*(r.read() for r in self._readers))
        now = self._clock()
        self.controller.observe(now, [r.signals() for r in self._readers])
        move = None
        # Half a sample of tolerance: a decision belongs to the beat nearest to it.
        if now + self._config.sample_s / 2 >= self._decide_at:
            self._decide_at = max(self._decide_at, now - self._config.interval_s / 2) + self._config.interval_s
            move = self.controller.decide(now)
            if move:
                self._pools.apply(move)
                logger.info("%s moves from %s to %s: %s", move.name, move.source, move.target, move.reason)
        self._note(now, self._pools.instances, self.controller.raw, move)
