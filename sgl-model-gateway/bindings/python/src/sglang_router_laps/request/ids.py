"""A request's ids: the client's, used in its answer and its aborts, and those that servers use.

SGLang aborts every request whose id begins with the one given. So servers only get ids made here, all of one length:
none is a prefix of another. In the first attempt they are hashes of the client's id and key, which every router can
compute.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

from laps_core.pools.instances import Role

AT_PREFILL = ".prefill"
"""Suffix of an id at the prefill server. SGLang aborts an id again two seconds after its stream has ended; without the
suffix that abort could hit a decode server's KV that the prefill server computes again under the same id."""
IDS_MAX = 256
"""Prompts of one batch that are aborted one by one; closing the connection aborts the rest."""
_MADE = re.compile(r"[0-9a-f]{32}")
_IN_REPLY = re.compile(rb"([0-9a-f]{32})(?:\.prefill)?")


def fresh() -> str:
    """Return a random id."""
    return os.urandom(16).hex()


def hashed(rid: str, owner: str | None = None) -> str:
    """Return the servers' id for the id of a client whose authorization is ``owner``."""
    return sha256(f"{owner or ''}\n{rid}".encode("utf-8", "surrogatepass")).hexdigest()[:32]


def elsewhere(rid: str, owner: str | None) -> Mapping[Role, Sequence[str]]:
    """Return the servers' ids of a client's ``rid`` that another router may have; that router may have made ``rid``
    itself."""
    ids = [hashed(rid, owner), *([rid] if _MADE.fullmatch(rid) else ())]
    return {"prefill": [one + AT_PREFILL for one in ids], "decode": ids}


class Ids:
    """Ids of one request. ``renew`` makes the servers' ids of the next attempt."""

    def __init__(self, rid: Any, batch: int | None, first: str | None = None, owner: str | None = None) -> None:
        """``rid``: the client's id; if None or "", ``first`` or a random id takes its place. ``batch``: number of
        prompts that SGLang makes requests of their own for; None for a single one. ``owner``: the client's
        authorization.

        Raises ValueError if SGLang does not accept ``rid``.
        """
        texts = rid if isinstance(rid, list) else [rid]
        if rid is not None and not all(isinstance(r, str) for r in texts):
            raise ValueError("neither a string nor a list of strings")
        if isinstance(rid, list):
            if len(rid) != batch:
                raise ValueError(f"{len(rid)} ids for {'one prompt' if batch is None else f'{batch} prompts'}")
            if len(set(rid)) < len(rid) or "" in rid:
                raise ValueError("the ids of a batch must be distinct and not empty")
        self._single = batch is None
        self._whole: str = first or fresh() if isinstance(rid, list) or not rid else rid
        """The client's id of the whole request."""
        self._client = rid if isinstance(rid, list) else [f"{self._whole}_{i}" for i in range(batch or 0)]
        """The client's ids of the prompts of a batch."""
        self._tried = False
        self._make(owner, self._whole if self._whole != rid else hashed(self._whole, owner))

    def renew(self) -> None:
        """Make random ids for every attempt but the first: a server refuses an id that is still in use there, and
        aborts a used id once more seconds later."""
        if self._tried:
            self._make(salt := fresh(), salt)
        self._tried = True

    def _make(self, salt: str | None, single: str) -> None:
        self._servers = [single] if self._single else [hashed(rid, salt) for rid in self._client]
        client = [self._whole] if self._single else self._client
        self._shown = {a.encode(): json.dumps(b)[1:-1].encode() for a, b in zip(self._servers, client, strict=True)}
        """Servers' ids and the client's, as they appear in replies."""
        self.name = self._servers[0] if self._servers else self._whole
        """Servers' id of the request, or of its first prompt, as it appears in logs."""

    def servers(self) -> tuple[str | list[str], str | list[str]]:
        """Return the ids at the prefill and at the decode server: one, or those of all prompts of a batch."""
        prefill, decode = self.known_as()
        return (prefill[0], decode[0]) if self._single else (prefill, decode)

    def known_as(self) -> tuple[list[str], list[str]]:
        """Return the lists of ids at the prefill and at the decode server, one per prompt."""
        return [rid + AT_PREFILL for rid in self._servers], self._servers

    def asked_by(self) -> Mapping[str, int | None]:
        """Map the client's ids that an abort may name to the prompt's index in the batch, or None for the whole
        request."""
        return {self._whole: None, **{rid: i for i, rid in enumerate(self._client[:IDS_MAX])}}

    def as_asked(self, reply: bytes) -> bytes:
        """Replace servers' ids by the client's in a server's reply or a message of the router."""
        if self._single:
            for made, rid in self._shown.items():
                if made in reply:
                    reply = reply.replace(made + AT_PREFILL.encode(), made).replace(made, rid)
            return reply
        return _IN_REPLY.sub(lambda found: self._shown.get(found[1], found[0]), reply)
