"""Aborts: requests in flight, permission to abort them, and their ids at the servers."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from hmac import compare_digest
from typing import Any
from weakref import WeakSet

from laps_core.pools.instances import Instance, Role

from .upstream import Answer, Sessions

logger = logging.getLogger(__name__)

ABORT = "abort_request"
TIMEOUT_S = 5.0
USED_S = 10.0
"""Time after the end of a request in which its ids can still be aborted (seconds): by this router, whose abort is under
way, or by SGLang, two seconds after a stream."""

Body = Mapping[str, Any]
"""JSON body of an abort request."""


class Aborted(Exception):
    """A request was aborted while no server worked on it."""


class LiveRequest:
    """A request from its arrival to its end, with the data that an abort needs."""

    def __init__(self, names: Mapping[str, int | None]) -> None:
        self.names = names
        """Client's ids: id of the whole request -> None, id of a batch's prompt -> index of the prompt."""
        self.at: Mapping[Instance, Sequence[str]] = {}
        """Ids of the request's prompts at each server that works on it, in the same order."""
        self.aborted = False
        """True once a client with permission has asked for an abort."""
        self._wait: asyncio.Timeout | None = None

    @asynccontextmanager
    async def waiting(self) -> AsyncIterator[None]:
        """Mark the time in which no server works on the request. Raises Aborted as soon as the request is aborted."""
        if self.aborted:
            raise Aborted
        try:
            async with asyncio.timeout(None) as wait:
                self._wait = wait
                yield
        except TimeoutError:
            if wait.expired():
                raise Aborted from None
            raise
        finally:
            self._wait = None

    def abort(self) -> None:
        """Mark the request as aborted, and end its wait. The servers must be asked separately to abort their work."""
        self.aborted = True
        if self._wait is not None and not self._wait.expired():
            self._wait.reschedule(0)

    def at_servers(self, rid: str) -> Mapping[Instance, Sequence[str]]:
        """Return the ids to abort at each server for the client's id ``rid``, of a prompt or of the whole request."""
        i = self.names.get(rid)
        return self.at if i is None else {server: ids[i : i + 1] for server, ids in self.at.items()}


class Aborter:
    """Register of the requests in flight, and sender of aborts."""

    def __init__(self, sessions: Sessions, instances: Sequence[Instance]) -> None:
        self._live: dict[str, list[LiveRequest]] = {}
        self._ended: OrderedDict[str, float] = OrderedDict()
        """Client's ids of the requests that ended in the last USED_S, with the time of the end (monotonic seconds)."""
        self._sessions = sessions
        self._instances = instances
        self._refused: WeakSet[Instance] = WeakSet()
        """Servers whose refusal has been logged."""

    def add(self, live: LiveRequest) -> None:
        for name in live.names:
            self._live.setdefault(name, []).append(live)

    def remove(self, live: LiveRequest) -> None:
        now = time.monotonic()
        while self._ended and next(iter(self._ended.values())) < now - USED_S:
            self._ended.popitem(last=False)
        for name in live.names:
            same = self._live[name]
            same.remove(live)
            if not same:
                del self._live[name]
            self._ended[name] = now
            self._ended.move_to_end(name)

    def was_used(self, live: LiveRequest) -> bool:
        """Return True if a request with one of the client's ids of ``live`` has just ended."""
        since = time.monotonic() - USED_S
        return any(self._ended.get(name, -math.inf) > since for name in live.names)

    def find(self, rid: str) -> Sequence[LiveRequest]:
        """Return the requests for which ``rid`` is the client's id of the request or of one of its prompts."""
        return self._live.get(rid, ())

    async def abort_at(
        self, instance: Instance, live: LiveRequest, ids: Sequence[str], authorization: str | None
    ) -> None:
        """Ask ``instance`` to abort ``live``, which has ended at this router; ``ids``: the ids of ``live`` there."""
        # The client may have sent another request with the same id.
        twins = [other for name in live.names for other in self.find(name)]
        # A server with an admin key accepts no other key for aborts, so try the router's own key first.
        keys: list[str | None] = [*dict.fromkeys(filter(None, (self._sessions.key, authorization)))] or [None]
        for rid in ids:
            if any(rid in other.at.get(instance, ()) for other in twins):
                continue
            status = 401
            while keys and status in (401, 403):
                answer = await self._sessions.post(instance, ABORT, keys[0], TIMEOUT_S, {"rid": rid})
                if answer is None:
                    return
                status = answer[0]
                if status in (401, 403):
                    del keys[0]
            if status >= 400 and instance not in self._refused:
                self._refused.add(instance)
                logger.warning(
                    "%s %s answers aborts with %d; requests of disconnected clients end there some seconds later%s",
                    instance.role, instance.url, status,
                    " (give the router the servers' admin key: --api-key)" if status in (401, 403) else "",
                )  # fmt: skip
            if not keys:
                return

    async def check_permission(self, authorization: str | None, unused: str) -> Answer | None:
        """Return a good answer if a client with this authorization may abort, else a server's refusal; None if no
        server was reached. Clients may abort with the router's key, or with a key with which a server of each role
        accepts an abort of the id ``unused``."""
        key = self._sessions.key
        if key and compare_digest((authorization or "").encode(), key.encode()):
            return 200, b""
        by_role: dict[str, list[Instance]] = {}
        for i in self._instances:
            if i.healthy:
                by_role.setdefault(i.role, []).append(i)

        async def first(instances: Sequence[Instance]) -> Answer | None:
            """Return the answer of the first reachable server: a server that counts as healthy may have just gone."""
            for i in instances:
                if (answer := await self._send_aborts(i, [{"rid": unused}], authorization)) is not None:
                    return answer
            return None

        return _worst(await asyncio.gather(*map(first, by_role.values())))

    async def forward(
        self, rid: str, elsewhere: Mapping[Role, Sequence[str]], authorization: str | None
    ) -> Answer | None:
        """Abort the requests with the client's id ``rid`` ("" = all requests), here and at their servers. Return the
        first bad answer, else a good answer; None if no server was reached. ``elsewhere``: ids to abort at all healthy
        servers if this router has no such request."""
        known = self.find(rid) if rid else dict.fromkeys(live for same in self._live.values() for live in same)
        wanted: dict[Instance, list[Body]] = {}
        for live in known:
            live.abort()
            for at, ids in live.at_servers(rid).items() if rid else ():
                wanted.setdefault(at, []).extend({"rid": one} for one in ids)
        if not (rid and known):
            every = [i for i in self._instances if i.healthy]
            wanted = {i: [{"rid": one} for one in elsewhere[i.role]] if rid else [{"abort_all": True}] for i in every}
        if not wanted:
            return 200, b""
        return _worst(
            await asyncio.gather(*(self._send_aborts(i, bodies, authorization) for i, bodies in wanted.items()))
        )

    async def _send_aborts(
        self, instance: Instance, bodies: Sequence[Body], authorization: str | None
    ) -> Answer | None:
        """Send ``bodies`` one after the other. Return the first bad answer, else the last; None if not reached."""
        answer: Answer | None = None
        for body in bodies:
            answer = await self._sessions.post(instance, ABORT, authorization, TIMEOUT_S, body)
            if answer is None or answer[0] >= 400:
                break
        return answer


def _worst(answers: Sequence[Answer | None]) -> Answer | None:
    """Return the first bad answer, else the first answer; None without an answer."""
    reached = [a for a in answers if a is not None]
    return next((a for a in reached if a[0] >= 400), reached[0] if reached else None)
