"""Dropping requests at the servers: which are there now, and who may be dropped."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..servers.instances import Instance
from ..servers.upstream import Answer, Sessions

logger = logging.getLogger(__name__)

ABORT = "abort_request"
TIMEOUT_S = 5.0


class Held:
    """A request as the servers that work on it know it."""

    __slots__ = ("asked", "ids", "rid")

    def __init__(self, rid: Any, ids: Mapping[Instance, Sequence[str]]) -> None:
        """`rid`: the client's. `ids`: those of its parts, in the same order at each server."""
        self.rid = rid
        self.ids = ids
        self.asked = False
        """A client has asked for its end."""

    def asked_of(self, rid: str) -> dict[Instance, Sequence[str]]:
        """The ids to abort at each server for the id `rid`: that of one part, or of all."""
        parts = {i for ids in self.ids.values() for i, one in enumerate(ids) if one == rid}
        if not parts:
            return dict(self.ids)
        return {instance: [ids[i] for i in sorted(parts)] for instance, ids in self.ids.items()}


class Live:
    """All requests that are at a server now."""

    def __init__(self) -> None:
        self._by_id: dict[str, list[Held]] = {}

    def add(self, held: Held) -> None:
        """Its attempt begins."""
        for name in self._names(held):
            self._by_id.setdefault(name, []).append(held)

    def remove(self, held: Held) -> None:
        """Its attempt has ended."""
        for name in self._names(held):
            same = self._by_id[name]
            same.remove(held)
            if not same:
                del self._by_id[name]

    @staticmethod
    def _names(held: Held) -> Iterator[str]:
        own = [held.rid] if isinstance(held.rid, str) else []
        yield from dict.fromkeys([*(one for ids in held.ids.values() for one in ids), *own])

    def holds(self, instance: Instance, rid: str) -> bool:
        """Whether a request is at ``instance`` under the very id ``rid``."""
        return any(rid in h.ids.get(instance, ()) for h in self._by_id.get(rid, ()))

    def named(self, rid: str) -> list[Held]:
        """Requests whose id, or whose batch's id, is ``rid``."""
        return list(self._by_id.get(rid, ()))

    def everything(self) -> set[Held]:
        """Every request."""
        return {h for same in self._by_id.values() for h in same}


class Aborter:
    """Sends aborts, and answers for what is live."""

    def __init__(self, sessions: Sessions, instances: Sequence[Instance], api_key: str | None) -> None:
        self.live = Live()
        self._sessions = sessions
        self._instances = instances
        self._key = f"Bearer {api_key}" if api_key else None
        self._refused: set[Instance] = set()
        """Servers whose refusal has been logged."""

    async def drop(self, instance: Instance, ids: Sequence[str], authorization: str | None) -> None:
        """Ask ``instance`` to drop requests that have ended here; never one that another live request is known by."""
        # A server with an admin key takes no other for this; the router's own key goes first.
        keys: list[str | None] = list(dict.fromkeys(k for k in (self._key, authorization) if k))
        keys = keys or [None]
        for rid in ids:
            if self.live.holds(instance, rid):
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

    async def forward(self, rid: str, everything: bool, authorization: str | None) -> Sequence[Answer] | None:
        """A client's abort to every server that has the request, with the client's own key; None: none was reached."""
        wanted = self._wanted(rid, everything)
        answers = await asyncio.gather(*(self._forward(i, bodies, authorization) for i, bodies in wanted.items()))
        reached = [a for a in answers if a is not None]
        return None if answers and not reached else reached

    def _wanted(self, rid: str, everything: bool) -> dict[Instance, list[dict[str, Any]]]:
        """What to ask of whom."""
        known = self.live.everything() if everything else set(self.live.named(rid))
        for held in known:
            held.asked = True
        up = [i for i in self._instances if i.healthy]
        if everything:
            return {i: [{"abort_all": True}] for i in up}
        if not rid:
            return {}
        if not known:
            # It may have come by another router.
            return {i: [{"rid": rid}] for i in up}
        wanted: dict[Instance, dict[str, None]] = {}
        for held in known:
            for i, ids in held.asked_of(rid).items():
                wanted.setdefault(i, {}).update(dict.fromkeys(ids))
        return {i: [{"rid": one} for one in found] for i, found in wanted.items()}

    async def _forward(
        self, instance: Instance, wanted: list[dict[str, Any]], authorization: str | None
    ) -> Answer | None:
        """The server's first bad answer, or its last; None when it cannot be reached."""
        answer: Answer | None = (200, b"")
        for body in wanted:
            answer = await self._sessions.tell(instance, ABORT, authorization, TIMEOUT_S, body)
            if answer is None or answer[0] >= 400:
                break
        return answer
