"""The background task that reads signals and lets the controller move servers between the pools."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from laps_core.pools.controller import Move, PoolController
from laps_core.pools.pressure import Pool, PressureConfig

from ..servers.instances import PrefillInstance
from ..servers.signals import SignalReader
from .choice import Pools

logger = logging.getLogger(__name__)

Note = Callable[[Sequence[PrefillInstance], dict[Pool, float], Move | None], None]
"""Told of each beat: the servers, the pressure of each pool, and the move, if there is one."""


class Control:
    """Algorithm 2 over live instances. ``run`` ends when cancelled."""

    def __init__(self, pools: Pools, readers: Sequence[SignalReader], config: PressureConfig, note: Note) -> None:
        self.controller = PoolController(config, time.monotonic())
        """What decides."""
        self._readers = readers
        self._pools = pools
        self._sample_s = config.sample_s
        self._note = note

    async def run(self) -> None:
        """Sample on a fixed grid, decide every control period."""
        at = time.monotonic()
        while True:
            await self.step()
            at += self._sample_s
            now = time.monotonic()
            if at <= now:
                # Too late for a beat: leave it out rather than run after it.
                at = now + self._sample_s
            await asyncio.sleep(at - now)

    async def step(self) -> None:
        """One sample, and a decision when one is due."""
        await asyncio.gather(*(r.read() for r in self._readers))
        move = self.controller.step(time.monotonic(), [r.signals() for r in self._readers])
        if move is not None:
            self._pools.apply(move)
            logger.info("%s moves from %s to %s: %s", move.name, move.source, move.target, move.reason)
        self._note(self._pools.instances, self.controller.raw, move)
