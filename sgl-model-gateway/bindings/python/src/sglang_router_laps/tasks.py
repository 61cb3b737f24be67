"""Background tasks: started, restarted when they fail, watched, and stopped with the application."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger(__name__)

PAUSE_S, PAUSE_MAX_S = 1.0, 30.0
"""First and longest delay before ended work is restarted (seconds)."""

Work = Coroutine[Any, Any, None]
Task = asyncio.Task[None]


@dataclass(slots=True)
class Watched:
    """Status of a task that runs until it is cancelled."""

    name: str
    alive: bool = False
    restarts: int = 0
    error: str | None = None
    """Last failure of the task."""


class Tasks:
    """Background tasks. Needs a running event loop. After ``close``, no task is started."""

    def __init__(self) -> None:
        self.watched: list[Watched] = []
        self._tasks: set[Task] = set()
        self._kept: set[Task] = set()
        """Tasks that run until cancelled."""
        self._closing = False

    def spawn(self, work: Work) -> Task | None:
        """Run ``work`` in the background and log its failure. After ``close``, return None without running it."""
        if self._closing:
            work.close()
            return None
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def keep(self, name: str, work: Callable[[], Work]) -> Task | None:
        """Run ``work`` until cancelled. If ``work`` fails or returns, restart it after a delay; a failure is logged."""
        task = self.spawn(self._keep(name, work))
        if task is not None:
            self._kept.add(task)
        return task

    def note(self, name: str, failure: Exception) -> None:
        """Record a failure that does not end the task ``name``."""
        for watched in self.watched:
            if watched.name == name:
                watched.error = f"{type(failure).__name__}: {failure}"

    async def finish(self, patience_s: float) -> None:
        """Wait for the end of the tasks that end by themselves, for at most ``patience_s`` seconds."""
        if others := self._tasks - self._kept:
            await asyncio.wait(others, timeout=patience_s)

    async def close(self) -> None:
        """Cancel all tasks and wait for their end."""
        self._closing = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, task: Task) -> None:
        self._tasks.discard(task)
        self._kept.discard(task)
        if not task.cancelled() and task.exception():
            logger.error("background task failed", exc_info=task.exception())

    async def _keep(self, name: str, work: Callable[[], Work]) -> None:
        watched, pause_s = Watched(name), PAUSE_S
        self.watched.append(watched)
        try:
            while True:
                began = time.monotonic()
                watched.alive = True
                try:
                    await work()
                except Exception as e:
                    watched.error = f"{type(e).__name__}: {e}"
                    logger.exception("%s failed; restarting it", name)
                watched.alive = False
                if time.monotonic() - began > PAUSE_MAX_S:
                    pause_s = PAUSE_S
                await asyncio.sleep(pause_s * (1 + 0.3 * random.random()))
                pause_s = min(pause_s * 2, PAUSE_MAX_S)
                watched.restarts += 1
        finally:
            self.watched.remove(watched)
