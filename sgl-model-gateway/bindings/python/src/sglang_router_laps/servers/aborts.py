"""Aborting requests: which are under way, who may end them, and which ids their servers know them by."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from hmac import compare_digest
from typing import Any
from weakref import WeakSet

from .instances import Instance, Role
from .upstream import Answer, Sessions

logger = logging.getLogger(__name__)

ABORT = "abort_request"
TIMEOUT_S = 5.0

Body = Mapping[str, Any]
"""Body of an abort request (JSON)."""


class Aborted(Exception):
    """A request that was at no server when a client asked for its end."""


class LiveRequest:
    """A request from its arrival to its end, as an abort sees it."""

    def __init__(self, names: Mapping[str, int | None]) -> None:
        self.names = names
        """The client's ids: of all of it (None), or of a prompt of a batch."""
        self.at: Mapping[Instance, Sequence[str]] = {}
        """The ids of its prompts, in the same order at each server that works on it."""
        self.aborted = False
        """A client that may do so has asked for its end."""
        self._wait: asyncio.Timeout | None = None

    @asynccontextmanager
    async def waiting(self) -> AsyncIterator[None]:
        """The time that it spends at no server. Raises Aborted as soon as its end is asked for."""
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
        """Start nothing more for it. What its servers do is theirs to end."""
        self.aborted = True
        if self._wait is not None and not self._wait.expired():
            self._wait.reschedule(0)

    def at_servers(self, rid: str) -> Mapping[Instance, Sequence[str]]:
        """The ids to abort at each server for the client's id ``rid``, or for all of it."""
        i = self.names.get(rid)
        return self.at if i is None else {server: ids[i : i + 1] for server, ids in self.at.items()}


class Aborter:
    """Knows the requests that are under way, and sends aborts."""

    def __init__(self, sessions: Sessions, instances: Sequence[Instance], api_key: str | None) -> None:
        self._live: dict[str, list[LiveRequest]] = {}
        self._sessions = sessions
        self._instances = instances
        self._key = f"Bearer {api_key}" if api_key else None
        self._refused: WeakSet[Instance] = WeakSet()
        """Servers whose refusal has been logged."""

    def add(self, live: LiveRequest) -> None:
        """Its passage begins."""
        for name in live.names:
            self._live.setdefault(name, []).append(live)

    def remove(self, live: LiveRequest) -> None:
        """Its passage has ended."""
        for name in live.names:
            same = self._live[name]
            same.remove(live)
            if not same:
                del self._live[name]

    def named(self, rid: str) -> Sequence[LiveRequest]:
        """Requests whose id, or one of whose prompts' ids, is the client's ``rid``."""
        return self._live.get(rid, ())

    async def drop(self, instance: Instance, live: LiveRequest, ids: Sequence[str], authorization: str | None) -> None:
        """Ask ``instance`` to drop ``live``, which has ended there, and is known there by ``ids``."""
        # Its client may have sent another one with its id.
        twins = [other for name in live.names for other in self.named(name)]
        # A server with an admin key takes no other for this; the router's own key goes first.
        keys: list[str | None] = list(dict.fromkeys(k for k in (self._key, authorization) if k))
        keys = keys or [None]
        for rid in ids:
            if any(rid in other.at.get(instance, ()) for other in twins):
                continue
            status = 401
            while keys and status in (401, 403):
                answer = await self._sessions.tell(instance, ABORT, keys[0], TIMEOUT_S, {"rid": rid})
                if answer is None:
                    return
                status = answer[0]
                if status in (401, 403):
                    del keys[0]
            if status >= 400 and instance not in self._refused:
                self._refused.add(instance)
                logger.warning(
                    "%s %s answers aborts with %d; requests whose clients left end there some seconds later%s",
                    instance.role, instance.url, status,
                    " (give the router the servers' admin key: --api-key)" if status in (401, 403) else "",
                )  # fmt: skip
            if not keys:
                return

    async def may(self, authorization: str | None, unused: str) -> Answer | None:
        """200 if a client with this key may abort, else the first server's refusal; None if no server was reached. It
        may with the router's key, or where a server of each role takes an abort of the ``unused`` id with it."""
        if self._key and compare_digest((authorization or "").encode(), self._key.encode()):
            return 200, b""
        by_role: dict[str, list[Instance]] = {}
        for i in self._instances:
            if i.healthy:
                by_role.setdefault(i.role, []).append(i)

        async def first(instances: Sequence[Instance]) -> Answer | None:
            """The answer of the first that can be reached: what is called healthy may have gone a moment ago."""
            for i in instances:
                if (answer := await self._tell(i, [{"rid": unused}], authorization)) is not None:
                    return answer
            return None

        return _worst(await asyncio.gather(*map(first, by_role.values())))

    async def forward(
        self, rid: str, elsewhere: Mapping[Role, Sequence[str]] | None, authorization: str | None
    ) -> Answer | None:
        """Abort the requests that clients call ``rid`` ("": all), here and at the servers that work on them; the first
        bad answer, or 200; None if no server was reached. ``elsewhere``: ids to abort at all healthy servers where this
        router has no such request, and always where all are aborted; None: no others are aborted."""
        known = self.named(rid) if rid else dict.fromkeys(live for same in self._live.values() for live in same)
        wanted: dict[Instance, list[Body]] = {}
        for live in known:
            live.abort()
            for at, ids in live.at_servers(rid).items() if rid else ():
                wanted.setdefault(at, []).extend({"rid": one} for one in ids)
        if elsewhere is not None and not (rid and known):
            every = [i for i in self._instances if i.healthy]
            wanted = {i: [{"rid": one} for one in elsewhere[i.role]] if rid else [{"abort_all": True}] for i in every}
        if not wanted:
            return 200, b""
        return _worst(await asyncio.gather(*(self._tell(i, bodies, authorization) for i, bodies in wanted.items())))

    async def _tell(self, instance: Instance, bodies: Sequence[Body], authorization: str | None) -> Answer | None:
        """The server's first bad answer, or its last; None where it cannot be reached."""
        answer: Answer | None = None
        for body in bodies:
            answer = await self._sessions.tell(instance, ABORT, authorization, TIMEOUT_S, body)
            if answer is None or answer[0] >= 400:
                break
        return answer


def _worst(answers: Sequence[Answer | None]) -> Answer | None:
    """The first bad answer, or any; None without one."""
    reached = [a for a in answers if a is not None]
    return next((a for a in reached if a[0] >= 400), reached[0] if reached else None)
