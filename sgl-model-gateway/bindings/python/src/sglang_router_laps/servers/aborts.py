"""Dropping requests at the servers: which are there now, and who may be dropped."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

from .instances import Instance
from .upstream import Answer, Sessions

logger = logging.getLogger(__name__)

ABORT = "abort_request"
TIMEOUT_S = 5.0


@dataclass(eq=False, slots=True)
class Held:
    """A request as the servers that work on it know it."""

    rid: Any
    """The client's."""
    ids: Mapping[Instance, Sequence[str]]
    """Those of its prompts, in the same order at each server."""
    asked: bool = False
    """A client has asked for its end."""

    def names(self) -> set[str]:
        """All that it is known by."""
        own = {self.rid} if self.rid and isinstance(self.rid, str) else set()
        return own.union(*self.ids.values())

    def asked_of(self, rid: str) -> Mapping[Instance, Sequence[str]]:
        """The ids to abort at each server for the id ``rid``: that of one prompt, or of all."""
        prompts = sorted({i for ids in self.ids.values() for i, one in enumerate(ids) if one == rid})
        return {at: [ids[i] for i in prompts] for at, ids in self.ids.items()} if prompts else self.ids


class Aborter:
    """Knows the requests that are at a server now, and sends aborts."""

    def __init__(self, sessions: Sessions, instances: Sequence[Instance], api_key: str | None) -> None:
        self._by_id: dict[str, list[Held]] = {}
        self._sessions = sessions
        self._instances = instances
        self._key = f"Bearer {api_key}" if api_key else None
        self._refused: WeakSet[Instance] = WeakSet()
        """Servers whose refusal has been logged."""

    def add(self, held: Held) -> None:
        """Its attempt begins."""
        for name in held.names():
            self._by_id.setdefault(name, []).append(held)

    def remove(self, held: Held) -> None:
        """Its attempt has ended."""
        for name in held.names():
            same = self._by_id[name]
            same.remove(held)
            if not same:
                del self._by_id[name]

    def named(self, rid: str) -> Sequence[Held]:
        """Requests whose id, or whose batch's id, is ``rid``."""
        return self._by_id.get(rid, ())

    async def drop(self, instance: Instance, ids: Sequence[str], authorization: str | None) -> None:
        """Ask ``instance`` to drop requests that have ended here; never one that another live request is known by."""
        # A server with an admin key takes no other for this; the router's own key goes first.
        keys: list[str | None] = list(dict.fromkeys(k for k in (self._key, authorization) if k))
        keys = keys or [None]
        for rid in ids:
            if any(rid in held.ids.get(instance, ()) for held in self.named(rid)):
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
        known = [held for same in self._by_id.values() for held in same] if everything else self.named(rid)
        for held in known:
            held.asked = True
        if known and not everything:
            wanted: dict[Instance, dict[str, None]] = {}
            for held in known:
                for instance, ids in held.asked_of(rid).items():
                    wanted.setdefault(instance, {}).update(dict.fromkeys(ids))
            return {instance: [{"rid": one} for one in ids] for instance, ids in wanted.items()}
        if not (rid or everything):
            return {}
        # An id that is not known here may have come by another router.
        return {i: [{"abort_all": True} if everything else {"rid": rid}] for i in self._instances if i.healthy}

    async def _forward(
        self, instance: Instance, wanted: Sequence[dict[str, Any]], authorization: str | None
    ) -> Answer | None:
        """The server's first bad answer, or its last; None when it cannot be reached."""
        answer: Answer | None = (200, b"")
        for body in wanted:
            answer = await self._sessions.tell(instance, ABORT, authorization, TIMEOUT_S, body)
            if answer is None or answer[0] >= 400:
                break
        return answer
