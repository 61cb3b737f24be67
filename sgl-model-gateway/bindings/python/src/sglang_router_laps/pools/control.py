"""The background task that reads signals and lets the controller move servers between the pools."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from laps_core.pools.controller import Move
from laps_core.pools.paper import controller
from laps_core.pools.pressure import BOTH, Pool, PressureConfig

from ..servers.decode import traffic
from ..servers.instances import Clock, PrefillInstance
from ..servers.reader import KvReader
from ..servers.signals import SignalReader
from .choice import Pools
from .record import Records

logger = logging.getLogger(__name__)

Failed = Callable[[Exception], None]
"""Told of each beat that failed."""
Note = Callable[[Sequence[PrefillInstance], dict[Pool, float], Sequence[Move], Sequence[Move]], None]
"""Told of each beat: the servers, the pressure of each pool, moves that were made, and those of other routers."""


class Control:
    """Algorithm 2 over live instances. ``run`` ends when cancelled."""

    def __init__(
        self,
        pools: Pools,
        readers: Sequence[SignalReader],
        records: Records,
        config: PressureConfig,
        note: Note,
        clock: Clock = time.monotonic,
        kv_readers: Sequence[KvReader] = (),
        failed: Failed = lambda e: None,
    ) -> None:
        self.controller = controller(config, clock())
        """What decides."""
        self._readers = readers
        self._kv_readers = kv_readers
        self._records = records
        self._pools = pools
        self._clock = clock
        self._sample_s = config.sample_s
        self._note, self._failed = note, failed

    async def run(self) -> None:
        """Sample on a fixed grid, decide every control period. A beat that fails is told, and the next one comes."""
        at = self._clock()
        while True:
            try:
                await self.step()
            except Exception as e:
                logger.exception("a beat of the controller failed")
                self._failed(e)
            at += self._sample_s
            now = self._clock()
            if at <= now:
                # Too late for a beat: leave it out rather than run after it.
                at = now + self._sample_s
            await asyncio.sleep(at - now)

    async def step(self) -> None:
        """One sample, and a decision when one is due."""
        readers = (*self._readers, *self._kv_readers)
        # What one of them fails with is told at the end: the others have been read, and wait for nobody.
        read = await asyncio.gather(*(r.read() for r in readers), return_exceptions=True)
        self._pools.traffic = traffic(self._pools.decoders)
        others = self._records.news()
        if others is not None:
            # As after a move of its own: what called for it is being seen to.
            laid_out = any(BOTH in (m.source, m.target) for m in others)
            self.controller.moved(self._clock(), laid_out=laid_out)
        await self._records.fill()
        wanted = self.controller.step(self._clock(), [r.signals() for r in self._readers])
        moves = await self._records.carry_out(wanted)
        for m in (*moves, *(others or ())):
            logger.info("%s moves from %s to %s: %s", m.name, m.source, m.target, m.reason)
        self._note(self._pools.instances, self.controller.raw, moves, others or ())
        for failure in filter(None, read):
            raise failure
