"""Background task that reads load signals and moves servers between the pools."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from laps_core.pools.choice import Pools
from laps_core.pools.config import AllocConfig
from laps_core.pools.controller import Move
from laps_core.pools.decode import estimate_traffic_ratio
from laps_core.pools.instances import Clock
from laps_core.pools.paper import controller
from laps_core.pools.prefill import PrefillInstance
from laps_core.pools.pressure import BOTH, Pool

from ..servers.reader import KvReader
from ..servers.signals import SignalReader
from .record import Records

logger = logging.getLogger(__name__)

Failed = Callable[[Exception], None]
"""Callback for the error of each failed iteration."""
Note = Callable[[Sequence[PrefillInstance], dict[Pool, float], Sequence[Move], Sequence[Move]], None]
"""Callback after each iteration: servers, pressure of each pool, moves made, and moves of other routers."""


class Control:
    """Control loop that runs Algorithm 2 (LAPS, s3.2) on live instances. ``run`` ends when cancelled."""

    def __init__(
        self,
        pools: Pools,
        readers: Sequence[SignalReader],
        records: Records,
        config: AllocConfig,
        note: Note,
        clock: Clock = time.monotonic,
        kv_readers: Sequence[KvReader] = (),
        failed: Failed = lambda e: None,
    ) -> None:
        self.controller = controller(config, clock())
        """Controller that decides on moves."""
        self._readers = readers
        self._kv_readers = kv_readers
        self._records = records
        self._pools = pools
        self._clock = clock
        self._sample_s = config.sample_s
        self._note, self._failed = note, failed

    async def run(self) -> None:
        """Take samples at fixed intervals, and decide every control period. A failed iteration is reported and does not
        stop the task."""
        at = self._clock()
        while True:
            try:
                await self.step()
            except Exception as e:
                logger.exception("an iteration of the pool controller failed")
                self._failed(e)
            at += self._sample_s
            now = self._clock()
            if at <= now:
                # The sample is late: skip it instead of catching up.
                at = now + self._sample_s
            await asyncio.sleep(at - now)

    async def step(self) -> None:
        """Take one sample, and move servers if a decision is due and calls for it."""
        readers = (*self._readers, *self._kv_readers)
        # Failures are raised at the end, so that a failed reader does not stop the other readers.
        read = await asyncio.gather(*(r.read() for r in readers), return_exceptions=True)
        self._pools.traffic_ratio = estimate_traffic_ratio(self._pools.decoders)
        others = self._records.news()
        if others is not None:
            # Start the cool-down as after this router's own moves: other routers have answered the present load.
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
