"""Under which ids a request is known: to its client, and in each attempt to the servers."""

from __future__ import annotations

import json
import os
import reprlib
from collections.abc import Mapping
from typing import Any

import orjson

from .prompt import COMPLETIONS, GENERATE

AT_PREFILL = ".prefill"
"""Behind a request's id at its prefill server."""
IDS_MAX = 256
"""Prompts of one batch that are aborted one by one; closing the connection aborts the rest."""
NAME_MAX = 200
"""Longer ids are shortened in logs and messages (characters)."""


def parts(endpoint: str, body: Mapping[str, Any]) -> int | None:
    """Into how many requests SGLang splits ``body``, each with an id of its own.

    None: it stays one, under the id as given. 0: n > 1, whose parts get ids that nobody is told.
    """
    params = body.get("sampling_params") if endpoint == GENERATE else body
    if isinstance(params, list):
        params = params[0] if params else None
    n = params.get("n") if isinstance(params, dict) else None
    if isinstance(n, int) and n > 1:
        return 0
    if endpoint == COMPLETIONS:
        return _several(body.get("prompt"))
    if endpoint != GENERATE:
        return None
    text = body.get("text")
    if text is not None:
        return len(text) if isinstance(text, list) else None
    return _several(body.get("input_ids"))


def _several(prompt: Any) -> int | None:
    return len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else None


def ids(rid: Any, count: int | None) -> list[str]:
    """The ids a server knows the request ``rid`` of ``count`` ``parts`` by."""
    if count == 0:
        return []
    if count is not None and isinstance(rid, str):
        return [f"{rid}_{i}" for i in range(min(count, IDS_MAX))]
    # SGLang takes an empty id for none.
    return [r for r in (rid[:IDS_MAX] if isinstance(rid, list) else [rid]) if isinstance(r, str) and r]


def fresh() -> str:
    """An id that nobody else has."""
    return os.urandom(16).hex()


class Ids:
    """The ids of one request. ``renew`` gives those of the next attempt."""

    def __init__(self, endpoint: str, body: Mapping[str, Any]) -> None:
        self.rid: Any = body.get("rid")
        """The client's; of this attempt where it chose none."""
        self.sent: Any = self.rid
        """At the decode server."""
        self._at_prefill: Any = self.rid
        self._given = self.rid is not None
        self._parts = parts(endpoint, body)
        self._attempts = 0
        self._client: list[tuple[bytes, bytes]] = []
        """Ids of this attempt and the client's own, as they stand in replies."""

    @property
    def name(self) -> str:
        """For people, whatever the client sent as one."""
        return self.rid if isinstance(self.rid, str) and len(self.rid) <= NAME_MAX else reprlib.repr(self.rid)

    def renew(self) -> None:
        """A server that has seen an id in another attempt refuses it until that is gone, and then aborts whatever has
        it once more, seconds later: each attempt but the first has ids of its own."""
        if not self._given:
            self.rid = self.sent = fresh()
        elif self._attempts:
            self._client = []
            self.sent = self._renamed(self.rid)
        self._attempts += 1
        self._at_prefill = at_prefill(self.sent)
        try:
            orjson.dumps(self._at_prefill)
        except TypeError:
            # What cannot be written goes as it came: the servers say what they make of it.
            self._at_prefill = self.sent

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
        prefill, decode = {"rid": self._at_prefill}, {"rid": self.sent}
        if self._given and self._attempts == 1:
            return ({} if self._at_prefill is self.sent else prefill), {}
        return prefill, decode

    def known_as(self) -> tuple[list[str], list[str]]:
        """The ids of its parts at the prefill and at the decode server."""
        return ids(self._at_prefill, self._parts), ids(self.sent, self._parts)

    def chosen(self) -> list[str]:
        """What the client may ask for it by: its id and those of its parts."""
        own = [self.rid] if isinstance(self.rid, str) else []
        return [i for i in (*own, *ids(self.rid, self._parts)) if i]

    @property
    def renamed(self) -> bool:
        """Whether replies carry ids that are not the client's."""
        return bool(self._client)

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
