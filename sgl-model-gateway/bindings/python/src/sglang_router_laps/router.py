"""The router and its parts, built once per process, and started and stopped with the application."""

from __future__ import annotations

import asyncio
import time

from laps_core.pools.config import AllocConfig
from sglang_router.router_args import RouterArgs

from .membership import Membership
from .memory import Budget
from .pools.control import Control
from .pools.record import Records
from .prompts.tokens import ByteCounter, TokenizerCounter
from .queue import Queue
from .servers.aborts import Aborter
from .tasks import Tasks
from .telemetry import Journal

HISTORY_S = 300.0
"""History in the status and on the page (seconds)."""
STOP_S, STEPS = 1.0, 20
"""Longest wait for requests that have been cancelled, and for their aborts (seconds), and how often to look."""
CONTROLLER = "controller"
"""Name of the task that moves servers between pools."""


class Router:
    """Parts of one router. Raises ConfigError if the servers do not fit the configuration."""

    def __init__(self, args: RouterArgs, config: AllocConfig) -> None:
        self.args = args
        self.config = config
        self.counter = TokenizerCounter(config.tokenizer) if config.tokenizer else ByteCounter()
        self.tasks = Tasks()
        self.spawn = self.tasks.spawn
        members = self.members = Membership(args, config, self.tasks)
        self.add, self.remove = members.add, members.remove
        self.pools, self.decoders, self.readers = members.pools, members.pools.decoders, members.readers
        self.instances, self.sessions, self.health = members.instances, members.sessions, members.health
        self.queue = Queue(args, self.has_servers)
        self.bodies = Budget(args.max_payload_size)
        self.draining = False
        """True while the router is being stopped and should get no new requests."""
        self.aborter = Aborter(self.sessions, self.instances)
        self.journal = Journal(HISTORY_S, round(HISTORY_S / config.sample_s))
        self.counts = self.journal.counts
        records = Records(self.pools, self.sessions)
        self.control = Control(
            self.pools,
            self.readers,
            records,
            config,
            self.journal.note_beat,
            kv_readers=members.kv_readers,
            failed=self._beat_failed,
        )
        self.started_at = time.monotonic()

    def has_servers(self) -> bool:
        """Return True if each role has a healthy server."""
        return all(any(i.healthy for i in role) for role in (self.pools.instances, self.decoders))

    def ready(self) -> bool:
        """Return True if the router should get requests: each role has a server that has passed a health check and is
        healthy."""
        roles = (self.pools.instances, self.decoders)
        return not self.draining and all(any(i.healthy and i.proven for i in role) for role in roles)

    async def open(self) -> None:
        """Start the background tasks."""
        self.members.open()
        self.tasks.keep(CONTROLLER, self.control.run)

    def _beat_failed(self, failure: Exception) -> None:
        self.counts.failed_beats += 1
        self.tasks.note(CONTROLLER, failure)

    async def close(self) -> None:
        """Stop the background tasks and close all connections. Requests that were cancelled first abort their halves at
        the servers."""
        self.draining = True
        for _ in range(STEPS):
            if not self.queue.in_flight:
                break
            await asyncio.sleep(STOP_S / STEPS)
        await self.tasks.finish(STOP_S)
        await self.tasks.close()
        await self.sessions.close()
