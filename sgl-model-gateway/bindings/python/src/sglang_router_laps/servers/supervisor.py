"""Work that never ends by itself: what fails is logged and started again, alone and after a pause."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger(__name__)

PAUSE_S = 1.0
PAUSE_MAX_S = 30.0


@dataclass(slots=True)
class Watched:
    """One piece of supervised work."""

    name: str
    alive: bool = False
    restarts: int = 0
    error: str | None = None
    """What it failed with last."""


class Supervisor:
    """Keeps the state of everything it runs in ``watched``."""

    def __init__(self) -> None:
        self.watched: list[Watched] = []

    async def run(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run ``work`` over and over until cancelled."""
        watched = Watched(name)
        self.watched.append(watched)
        pause = PAUSE_S
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            watched.alive = True
            try:
                await work()
                watched.error = "ended"
                logger.error("%s ended; it starts again", name)
            except Exception as e:
                watched.error = f"{type(e).__name__}: {e}"
                logger.exception("%s failed; it starts again", name)
            finally:
                watched.alive = False
            if loop.time() - began > PAUSE_MAX_S:
                pause = PAUSE_S
            await asyncio.sleep(pause * (1 + 0.3 * random.random()))
            pause = min(pause * 2, PAUSE_MAX_S)
            watched.restarts += 1
