"""The router with its parts: built once, used by each request, started and stopped with the application."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any

from laps_core.config import ConfigError
from sglang_router.router_args import RouterArgs

from .config import AllocConfig
from .pools.choice import Pools
from .pools.control import Control
from .prompts.tokens import ByteCounter, TokenizerCounter
from .servers.aborts import Aborter
from .servers.breaker import Breaker
from .servers.health import Health
from .servers.instances import Instance
from .servers.signals import SignalReader
from .servers.upstream import Sessions
from .telemetry import Journal

logger = logging.getLogger(__name__)

HISTORY_S = 300.0
"""How far back status and page look (seconds)."""
MOST = 8192
"""Unless --max-concurrent-requests says otherwise: beyond, requests would only wait (requests)."""
PAUSE_S, PAUSE_MAX_S = 1.0, 30.0
"""Before work that failed starts again, at first and at most (seconds)."""


@dataclass(slots=True)
class Watched:
    """Work that never ends by itself."""

    name: str
    alive: bool = False
    restarts: int = 0
    error: str | None = None
    """What it failed with last."""


class Router:
    """Raises ConfigError when the servers and the configuration do not fit each other."""

    def __init__(self, args: RouterArgs, config: AllocConfig) -> None:
        self.args = args
        self.config = config
        self.in_flight = 0
        self.max_in_flight: int = args.max_concurrent_requests if args.max_concurrent_requests > 0 else MOST
        self.counter = TokenizerCounter(config.tokenizer) if config.tokenizer else ByteCounter()
        self.pools = Pools(args.prefill_urls, config, decoders=args.decode_urls)
        self.decoders = self.pools.decoders
        self.instances: list[Instance] = [*self.pools.instances, *self.decoders]
        twice = [url for url, n in Counter(i.url for i in self.instances).items() if n > 1]
        if twice:
            raise ConfigError(f"{twice[0]} is given twice")
        for i in self.instances:
            i.breaker = Breaker(
                0 if args.disable_circuit_breaker else max(0, args.cb_failure_threshold),
                args.cb_success_threshold,
                args.cb_timeout_duration_secs,
                args.cb_window_duration_secs,
            )
        self.sessions = Sessions(args.request_timeout_secs)
        self.health = Health(self.sessions, args)
        self.aborter = Aborter(self.sessions, self.instances, args.api_key)
        pressure = config.pressure
        self.readers = [
            SignalReader(i, self.sessions, args.api_key, max(pressure.sample_s, 1.0)) for i in self.pools.instances
        ]
        self.journal = Journal(HISTORY_S, round(HISTORY_S / pressure.sample_s))
        self.counts = self.journal.counts
        self.control = Control(self.pools, self.readers, pressure, self.journal.note_beat)
        self.started_at = time.monotonic()
        self.watched: list[Watched] = []
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closing = False

    async def open(self) -> None:
        """Start the background tasks."""
        for i in self.instances:
            self.spawn(self._keep(f"health of {i.url}", partial(self.health.watch, i)))
        self.spawn(self._keep("controller", self.control.run))

    async def close(self) -> None:
        """Stop the background tasks and close all connections."""
        self._closing = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.sessions.close()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run ``work`` beside everything else, unless all is being closed; what it fails with is logged."""
        if self._closing:
            work.close()
            return
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception():
            logger.error("a background task failed", exc_info=task.exception())

    async def _keep(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run ``work``, which ends when cancelled; where it fails, that is logged and it starts again after a pause."""
        watched = Watched(name)
        self.watched.append(watched)
        pause_s = PAUSE_S
        while True:
            began = time.monotonic()
            watched.alive = True
            try:
                await work()
            except Exception as e:
                watched.error = f"{type(e).__name__}: {e}"
                logger.exception("%s failed; it starts again", name)
            finally:
                watched.alive = False
            if time.monotonic() - began > PAUSE_MAX_S:
                pause_s = PAUSE_S
            await asyncio.sleep(pause_s * (1 + 0.3 * random.random()))
            pause_s = min(pause_s * 2, PAUSE_MAX_S)
            watched.restarts += 1
