"""The background task that reads signals, lets the controller decide, and keeps what the page shows."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from laps_core.pools.pressure import POOLS, Move, PoolController

from .config import AllocConfig
from .counts import Counts
from .instances import Clock
from .pools import Pools
from .signals import SignalReader
from .ttft import TtftWindow

logger = logging.getLogger(__name__)

MOVES_KEPT = 100
TTFT_SPAN_S = 10.0
"""A point of the TTFT history covers this much time (seconds)."""


@dataclass(frozen=True, slots=True)
class Moved:
    """A move and the wall-clock time of it (seconds since 1970)."""

    move: Move
    at: float


class Control:
    """Algorithm 2 over live instances. ``run`` ends when cancelled."""

    def __init__(
        self,
        pools: Pools,
        readers: Sequence[SignalReader],
        config: AllocConfig,
        counts: Counts,
        ttft: TtftWindow,
        clock: Clock = time.monotonic,
    ) -> None:
        self.controller = PoolController(config.pressure)
        self.readers = readers
        self.moves: deque[Moved] = deque(maxlen=MOVES_KEPT)
        self.history: deque[dict[str, Any]] = deque(maxlen=max(2, round(config.history_s / config.sample_s)))
        self._pools = pools
        self._config = config
        self._counts = counts
        self._ttft = ttft
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
        await asyncio.gather(*(r.read() for r in self.readers))
        now = self._clock()
        self.controller.observe(now, [r.signals() for r in self.readers])
        # Half a sample of tolerance: a decision belongs to the beat nearest to it.
        if now + self._config.sample_s / 2 >= self._decide_at:
            self._decide_at = max(self._decide_at, now - self._config.interval_s / 2) + self._config.interval_s
            move = self.controller.decide(now)
            if move:
                self._carry_out(move)
        self._remember(now)

    def _carry_out(self, move: Move) -> None:
        self._pools.apply(move)
        self._counts.moves[move.target] += 1
        self.moves.append(Moved(move, time.time()))
        logger.info("%s moves from %s to %s: %s", move.name, move.source, move.target, move.reason)

    def _remember(self, now: float) -> None:
        recent = self._ttft.quantiles_ms(now, TTFT_SPAN_S)
        self.history.append(
            {
                "at": round(time.time(), 3),
                "pools": ["s" if i.pool == "short" else "l" for i in self._pools.instances],
                "healthy": [int(i.healthy) for i in self._pools.instances],
                "pressure": {p: round(self.controller.raw[p], 4) for p in POOLS},
                "ttft_p90_ms": {p: recent[p]["p90"] for p in POOLS},
            }
        )
