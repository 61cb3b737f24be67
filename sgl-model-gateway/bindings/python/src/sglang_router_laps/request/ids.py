"""A request's ids: the client's, which its answer and its aborts go by, and those that the servers know it by.

SGLang aborts every request whose id begins with the one given. So servers only get ids made here: all of one length,
so that none is a prefix of another. In the first attempt they are hashes of the client's id and key, which every router
finds.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

from ..servers.instances import Role

AT_PREFILL = ".prefill"
"""Suffix of an id at the prefill server. SGLang aborts an id once more two seconds after its stream has ended, and a
decode server that gives KV back (retraction, a pause) has it computed again by the prefill server under its own id."""
IDS_MAX = 256
"""Prompts of one batch that are aborted one by one; closing the connection aborts the rest."""
_MADE = re.compile(r"[0-9a-f]{32}")
_IN_REPLY = re.compile(rb"([0-9a-f]{32})(?:\.prefill)?")


def fresh() -> str:
    """An id that nobody else has."""
    return os.urandom(16).hex()


def hashed(rid: str, owner: str | None = None) -> str:
    """The servers' id for that of a client whose authorization is ``owner``."""
    return sha256(f"{owner or ''}\n{rid}".encode("utf-8", "surrogatepass")).hexdigest()[:32]


def elsewhere(rid: str, owner: str | None) -> Mapping[Role, Sequence[str]]:
    """The servers' ids of what a client knows as ``rid`` if another router has it: it may have made that id itself."""
    ids = [hashed(rid, owner), *([rid] if _MADE.fullmatch(rid) else ())]
    return {"prefill": [one + AT_PREFILL for one in ids], "decode": ids}


class Ids:
    """The ids of one request. ``renew`` gives its servers' ids of the next attempt."""

    def __init__(self, rid: Any, batch: int | None, first: str | None = None, owner: str | None = None) -> None:
        """``rid``: the client's; None or "" where it chose none, then ``first`` or a fresh one is. ``batch``: number of
        prompts SGLang makes requests of their own for; None for a single one. ``owner``: the client's authorization.

        Raises ValueError where SGLang takes no such ``rid``.
        """
        texts = rid if isinstance(rid, list) else [rid]
        if rid is not None and not all(isinstance(r, str) for r in texts):
            raise ValueError("neither a string nor a list of strings")
        if isinstance(rid, list):
            if len(rid) != batch:
                raise ValueError(f"{len(rid)} ids for {'one prompt' if batch is None else f'{batch} prompts'}")
            if len(set(rid)) < len(rid) or "" in rid:
                raise ValueError("the ids of a batch are neither empty nor equal to one another")
        self._single = batch is None
        self._whole: str = first or fresh() if isinstance(rid, list) or not rid else rid
        """The client's id of all of it."""
        self._client = rid if isinstance(rid, list) else [f"{self._whole}_{i}" for i in range(batch or 0)]
        """Its ids of the prompts of a batch."""
        self._tried = False
        self._make(owner, self._whole if self._whole != rid else hashed(self._whole, owner))

    def renew(self) -> None:
        """A server that has seen an id in another attempt refuses it until that is gone, and then aborts whatever has
        it once more, seconds later: each attempt but the first has ids that nobody else has."""
        if self._tried:
            self._make(salt := fresh(), salt)
        self._tried = True

    def _make(self, salt: str | None, single: str) -> None:
        self._servers = [single] if self._single else [hashed(rid, salt) for rid in self._client]
        client = [self._whole] if self._single else self._client
        self._shown = {a.encode(): json.dumps(b)[1:-1].encode() for a, b in zip(self._servers, client, strict=True)}
        """The servers' ids and the client's, as they stand in replies."""
        self.name = self._servers[0] if self._servers else self._whole
        """The servers' id of it, or of its first prompt, which logs have."""

    def servers(self) -> tuple[str | list[str], str | list[str]]:
        """The ids at the prefill and at the decode server: one, or those of all prompts of a batch."""
        prefill, decode = self.known_as()
        return (prefill[0], decode[0]) if self._single else (prefill, decode)

    def known_as(self) -> tuple[list[str], list[str]]:
        """The ids of its prompts at the prefill and at the decode server."""
        return [rid + AT_PREFILL for rid in self._servers], self._servers

    def asked_by(self) -> Mapping[str, int | None]:
        """Client's ids that an abort may name -> index of the prompt in the batch, or None for all of the request."""
        return {self._whole: None, **{rid: i for i, rid in enumerate(self._client[:IDS_MAX])}}

    def as_asked(self, reply: bytes) -> bytes:
        """A server's reply, or a message of the router's with ``name``, with the client's ids."""
        if self._single:
            for made, rid in self._shown.items():
                if made in reply:
                    reply = reply.replace(made + AT_PREFILL.encode(), made).replace(made, rid)
            return reply
        return _IN_REPLY.sub(lambda found: self._shown.get(found[1], found[0]), reply)
