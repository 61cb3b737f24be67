"""Under which ids a request is known: to its client, and in each attempt to the servers."""

from __future__ import annotations

import json
import os
import reprlib
from typing import Any

import orjson

AT_PREFILL = ".prefill"
"""Behind a request's id at its prefill server."""
IDS_MAX = 256
"""Prompts of one batch that are aborted one by one; closing the connection aborts the rest."""
NAME_MAX = 200
"""Longer ids are shortened in logs and messages (characters)."""


def ids(rid: Any, batch: int | None) -> list[str]:
    """The ids a server knows the request ``rid`` by, a ``batch`` of so many prompts or a single one (None)."""
    if batch is not None and isinstance(rid, str):
        return [f"{rid}_{i}" for i in range(min(batch, IDS_MAX))]
    # SGLang takes an empty id for none.
    return [r for r in (rid[:IDS_MAX] if isinstance(rid, list) else [rid]) if isinstance(r, str) and r]


def fresh() -> str:
    """An id that nobody else has."""
    return os.urandom(16).hex()


class Ids:
    """The ids of one request. ``renew`` gives those of the next attempt."""

    def __init__(self, rid: Any, batch: int | None, first: str | None = None) -> None:
        """``rid``: the client's, of any kind; None where it chose none, then ``first`` is that of the first attempt."""
        self.rid = rid
        self._first = first
        """The client's; of this attempt where it chose none."""
        self._asked = self._at_prefill = self._at_decode = rid
        self._batch = batch
        self._tried = False
        self._client: list[tuple[bytes, bytes]] = []
        """Ids of this attempt and the client's own, as they stand in replies."""

    @property
    def name(self) -> str:
        """For people, whatever the client sent as one."""
        short = isinstance(self.rid, str) and len(self.rid) <= NAME_MAX
        # As JSON, so that none begins a line of its own in a log.
        return json.dumps(self.rid if short else reprlib.repr(self.rid))[1:-1]

    def renew(self) -> None:
        """A server that has seen an id in another attempt refuses it until that is gone, and then aborts whatever has
        it once more, seconds later: each attempt but the first has ids of its own."""
        if self._asked is None:
            self.rid = self._at_decode = (None if self._tried else self._first) or fresh()
        elif self._tried:
            self._client = []
            self._at_decode = self._renamed(self._asked)
        self._tried = True
        self._at_prefill = at_prefill(self._at_decode)
        try:
            orjson.dumps(self._at_prefill)
        except TypeError:
            # What cannot be written goes as it came: the servers say what they make of it.
            self._at_prefill = self._at_decode

    def _renamed(self, rid: Any) -> Any:
        if isinstance(rid, list):
            return [self._renamed(r) for r in rid]
        if not isinstance(rid, str):
            # No id: the server makes one.
            return None
        made = fresh()
        self._client.append((made.encode(), json.dumps(rid)[1:-1].encode()))
        return made

    def members(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Members to be added to the body for the prefill and for the decode server: none where it is as it came."""
        prefill, decode = ({} if r is self._asked else {"rid": r} for r in (self._at_prefill, self._at_decode))
        return prefill, decode

    def known_as(self) -> tuple[list[str], list[str]]:
        """The ids of its prompts at the prefill and at the decode server."""
        return ids(self._at_prefill, self._batch), ids(self._at_decode, self._batch)

    def chosen(self) -> list[str]:
        """What the client may ask for it by: its id and those of its prompts."""
        own = [self.rid] if isinstance(self.rid, str) and self.rid else []
        return own + ids(self.rid, self._batch)

    def as_asked(self, reply: bytes) -> bytes:
        """A reply with the client's own ids."""
        for ours, theirs in self._client:
            reply = reply.replace(ours, theirs)
        return reply


def at_prefill(rid: Any) -> Any:
    """The id that a request has at its prefill server, where `rid` is the one at the decode server.

    SGLang aborts an id once more two seconds after its stream has ended. A decode server that gives KV back
    (retraction, a pause) has it computed again by the prefill server under its own id, which must not be that one.
    """
    if isinstance(rid, list):
        return [at_prefill(r) for r in rid]
    return rid + AT_PREFILL if isinstance(rid, str) and rid else rid
