"""Ids of a request: the client's ids, used in its answer and its aborts, and the server-side ids.

SGLang aborts every request whose id starts with the given id. So servers only get ids made here, all of one length: no
id is a prefix of another. If the client gives an id, the ids of the first attempt are hashes of the client's id and
key, which every router can compute.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

from laps_core.pools.instances import Role
from laps_core.receipts.receipt import AT_PREFILL

IDS_MAX = 256
"""Most prompts of a batch that are aborted by id; closing the connection aborts the rest."""
RID_LONGEST = 256
"""Longest id of a client (characters): each event of a stream repeats the id."""
_MADE = re.compile(r"[0-9a-f]{32}")
_IN_REPLY = re.compile(rb"([0-9a-f]{32})(?:%b)?" % re.escape(AT_PREFILL).encode())


def fresh() -> str:
    return os.urandom(16).hex()


def hashed(rid: str, owner: str | None = None) -> str:
    """Return the server-side id for the id ``rid`` of a client whose authorization is ``owner``."""
    return sha256(f"{owner or ''}\n{rid}".encode("utf-8", "surrogatepass")).hexdigest()[:32]


def ids_elsewhere(rid: str, owner: str | None) -> Mapping[Role, Sequence[str]]:
    """Return the server-side ids, by role, that another router may use for a client's ``rid``. That router may have
    made ``rid`` itself."""
    ids = [hashed(rid, owner), *([rid] if _MADE.fullmatch(rid) else ())]
    return {"prefill": [one + AT_PREFILL for one in ids], "decode": ids}


class Ids:
    """Ids of one request. ``renew`` makes the server-side ids of the next attempt."""

    def __init__(self, rid: Any, batch: int | None, first: str | None = None, owner: str | None = None) -> None:
        """``rid``: the client's id; if None or "", ``first`` or a random id takes its place. ``batch``: number of
        prompts that SGLang splits into separate requests; None for a single prompt. ``owner``: the client's
        authorization.

        Raises ValueError if SGLang does not accept ``rid``, or if it is too long.
        """
        texts = rid if isinstance(rid, list) else [rid]
        if rid is not None and not all(isinstance(r, str) and len(r) <= RID_LONGEST for r in texts):
            raise ValueError(f"neither a string nor a list of strings of at most {RID_LONGEST} characters")
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
        """Make random ids from the second call on. A server refuses an id that is still in use there, and
        aborts a used id once more some seconds later."""
        if self._tried:
            self._make(salt := fresh(), salt)
        self._tried = True

    def _make(self, salt: str | None, single: str) -> None:
        self._servers = [single] if self._single else [hashed(rid, salt) for rid in self._client]
        client = [self._whole] if self._single else self._client
        self._shown = {a.encode(): json.dumps(b)[1:-1].encode() for a, b in zip(self._servers, client, strict=True)}
        """Server-side ids with the client's ids, as they appear in replies."""
        self.name = self._servers[0] if self._servers else self._whole
        """Server-side id of the request, or of its first prompt, as it appears in logs."""

    def body_ids(self) -> tuple[str | list[str], str | list[str]]:
        """Return the ids at the prefill and at the decode server: a single id each, or the list of a batch's ids."""
        prefill, decode = self.server_ids()
        return (prefill[0], decode[0]) if self._single else (prefill, decode)

    def server_ids(self) -> tuple[list[str], list[str]]:
        """Return the lists of ids at the prefill and at the decode server, one per prompt."""
        return [rid + AT_PREFILL for rid in self._servers], self._servers

    def client_ids(self) -> Mapping[str, int | None]:
        """Return the client's ids that an abort may name, each with the index of its prompt; None for the whole
        request."""
        return {self._whole: None, **{rid: i for i, rid in enumerate(self._client[:IDS_MAX])}}

    def with_client_ids(self, reply: bytes) -> bytes:
        """Return a server's reply, or a message of the router, with the client's ids in place of server-side ids."""
        if self._single:
            for made, rid in self._shown.items():
                if made in reply:
                    reply = reply.replace(made + AT_PREFILL.encode(), made).replace(made, rid)
            return reply
        return _IN_REPLY.sub(lambda found: self._shown.get(found[1], found[0]), reply)
