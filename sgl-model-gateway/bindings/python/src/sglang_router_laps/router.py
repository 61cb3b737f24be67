"""The router with its parts: built once, read by the application, started and stopped with it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Coroutine
from typing import Any

from laps_core.config import ConfigError
from sglang_router.router_args import RouterArgs

from . import stock_flags
from .config import AllocConfig
from .pools.choice import Pools
from .pools.control import Control
from .pools.pairs import Pairs
from .request.aborts import Aborter
from .request.retries import RetryBudget
from .request.services import Services
from .request.tokens import make_counter
from .servers.breaker import Breaker
from .servers.health import Health
from .servers.instances import Instance
from .servers.places import MOST, Places
from .servers.signals import SignalReader
from .servers.supervisor import Supervisor
from .servers.upstream import Sessions
from .telemetry.history import History
from .telemetry.journal import Journal

logger = logging.getLogger(__name__)

HISTORY_S = 300.0
"""How far back status and page look (seconds)."""


class Router:
    """Raises ConfigError when the servers and the configuration do not fit each other."""

    def __init__(self, args: RouterArgs, config: AllocConfig) -> None:
        self.config = config
        self.max_payload: int = args.max_payload_size
        self.timeout: float = args.request_timeout_secs
        self.places = Places(args.max_concurrent_requests if args.max_concurrent_requests > 0 else MOST)
        counter = make_counter(config.tokenizer)
        self.pools = Pools(args.prefill_urls, config)
        self.decoders = [Instance(url, "decode") for url in args.decode_urls]
        self.instances: list[Instance] = [*self.pools.instances, *self.decoders]
        twice = [url for url, n in Counter(i.url for i in self.instances).items() if n > 1]
        if twice:
            raise ConfigError(f"{twice[0]} is given twice")
        breaker = stock_flags.breaker_config(args)
        for i in self.instances:
            i.breaker = Breaker(breaker)
        pressure = config.pressure
        pairs = Pairs(self.pools, self.decoders)
        self.sessions = Sessions(self.timeout)
        self.supervisor = Supervisor()
        self.health = Health(self.instances, self.sessions, stock_flags.health_config(args), self.supervisor)
        self.readers = [
            SignalReader(i, self.sessions, args.api_key, max(pressure.sample_s, 1.0), time.monotonic)
            for i in self.pools.instances
        ]
        journal = Journal(HISTORY_S)
        self.counts = journal.counts
        self.history = History(journal, round(HISTORY_S / pressure.sample_s))
        self.control = Control(self.pools, self.readers, pressure, self.history.note)
        self.services = Services(
            pairs=pairs,
            sessions=self.sessions,
            health=self.health,
            aborter=Aborter(self.sessions, self.instances, args.api_key),
            counter=counter,
            journal=journal,
            retries=stock_flags.retry_config(args),
            budget=RetryBudget(),
            spawn=self.spawn,
        )
        self.started_at = time.monotonic()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closing = False

    async def open(self) -> None:
        """Start the background tasks."""
        self.spawn(self.health.run())
        self.spawn(self.supervisor.run("controller", self.control.run))

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
