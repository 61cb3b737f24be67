"""Polling of a server's own load reports, by the best route that the server answers."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable

import aiohttp
from laps_core.pools.decode import DecodeInstance, Kv
from laps_core.pools.instances import Instance
from laps_core.pools.stock import LOADS, Missing, read_loads

from .upstream import Sessions

RETRY_S = 60.0
"""Time after which a missing route is tried again (seconds), because the server may have been replaced."""
PATIENCE_S = 30.0
"""Time limit for a server's answer (seconds); the server is not polled again meanwhile."""

Parse = Callable[[bytes], Awaitable[None]]
"""Processing of an answer. Raises Missing, ValueError and OverflowError if it is unusable."""


class Reader:
    """Poller of one server."""

    def __init__(self, instance: Instance, sessions: Sessions, period_s: float) -> None:
        """``period_s``: polling period (seconds)."""
        self.routes: tuple[tuple[str, Parse], ...] = ()
        """Routes and their parsers, in order of preference."""
        self._server = instance
        self._sessions = sessions
        self._period_s = period_s
        self._polling: asyncio.Task[str | None] | None = None
        self._polled_at = -math.inf
        """Time at which the latest poll was sent (by the instance's clock)."""
        self._answered_at = -math.inf
        """Time of the latest usable answer (by the instance's clock)."""
        self._level = 0
        self._stepped_at = instance.clock()

    @property
    def bare(self) -> bool:
        """Return True if the server has none of the routes."""
        return self._level == len(self.routes)

    async def read(self) -> None:
        """Poll the server, and keep its answer. Never raises."""
        raise NotImplementedError

    async def poll(self) -> str | None:
        """Poll the server, unless an earlier poll is still without an answer. Return the route that has answered; None
        if no route is usable, the server is not reached, or no answer comes within half a period: the next call then
        waits for that answer."""
        clock = self._server.clock
        if self._level and clock() - self._stepped_at > RETRY_S:
            self._level = 0
        if self._polling is None:
            self._polling = asyncio.get_running_loop().create_task(self._poll())
        try:
            done, _ = await asyncio.wait((self._polling,), timeout=self._period_s / 2)
        except asyncio.CancelledError:
            self._polling.cancel()
            raise
        if not done:
            return None
        asked, self._polling = self._polling, None
        return asked.result()

    async def _poll(self) -> str | None:
        while self._server.healthy and not self.bare:
            path, parse = self.routes[self._level]
            self._polled_at = self._server.clock()
            try:
                await parse(await self.get(path))
                self._answered_at = self._server.clock()
                return path.partition("?")[0]
            except (Missing, ValueError, OverflowError):
                self._level += 1
                self._stepped_at = self._server.clock()
            except (aiohttp.ClientError, OSError):
                # The server is slow or gone: ``Health`` judges that, and the route is not to blame.
                break
        return None

    async def get(self, path: str) -> bytes:
        """Return the body of the answer. Raises Missing if the status is not 200, aiohttp.ClientError, and OSError."""
        status, text = await self._sessions.request(self._server, path, PATIENCE_S, self._sessions.key)
        if status >= 500 and self._server.clock() - self._answered_at < RETRY_S:
            # A server, or a proxy before it, that is overloaded for a moment has its routes nevertheless.
            raise aiohttp.ClientError(status)
        if status != 200:
            raise Missing
        return text


class KvReader(Reader):
    """Poller of a decode server, which maintains ``DecodeInstance.kv``."""

    def __init__(self, instance: DecodeInstance, sessions: Sessions, period_s: float) -> None:
        super().__init__(instance, sessions, period_s)
        self.instance = instance
        self.routes = ((LOADS, self._record_kv),)
        self._own = 0

    async def read(self) -> None:
        """Poll the server. Drop its last report if it is unhealthy, has no load route, or is silent for PATIENCE_S."""
        if self._polling is None:
            # Requests sent while the server answers are taken as missing in the answer, though it may include them.
            self._own = self.instance.outstanding_tokens
        if await self.poll() is None:
            silent_s = self.instance.clock() - self._answered_at
            if self.bare or not self.instance.healthy or silent_s > PATIENCE_S:
                self.instance.kv = None

    async def _record_kv(self, text: bytes) -> None:
        ranks = read_loads(text)
        reported = [r.num_total_tokens for r in ranks if r.num_total_tokens is not None]
        sizes = [r.max_total_num_tokens for r in ranks]
        if len(reported) < len(ranks) or not min(sizes):
            raise Missing
        self.instance.kv = Kv(reported=sum(reported), capacity=sum(sizes), largest_rank=max(sizes), own=self._own)
