"""A client's request, with the data that all of its attempts need."""

from __future__ import annotations

import math
import random
import time
from typing import Any

import orjson
from laps_core.policy.types import Waiting
from laps_core.pools.prefill import PrefillInstance
from laps_core.pools.prefixes import NOTHING
from laps_core.pools.pressure import Pool
from laps_core.pools.ranks import Rank
from laps_core.protocol import DEADLINE_HEADER
from starlette.types import Scope

from ..prompts.measure import measure
from ..prompts.reading import Prompt, answer_tokens, batch_size, read_prompt
from ..prompts.tokens import TokenCounter
from ..servers.upstream import bootstrap_host, forwarded
from . import body as bodies
from . import receipt as receipts
from .ids import Ids
from .replies import BadRequest
from .trail import Trail

ROOM_BITS = 62
"""Bits of a bootstrap room, the number where the two servers of a request meet."""


class Call:
    """A request whose body has been read."""

    def __init__(self, trail: Trail, scope: Scope, raw: bytes, body: dict[str, Any]) -> None:
        """``raw`` and ``body`` are results of ``body.parse``. Raises BadRequest for an invalid deadline header or
        ``rid``."""
        self.trail = trail
        self.endpoint = endpoint = trail.endpoint
        self.arrived = time.monotonic()
        self.headers = forwarded(scope["headers"])
        self.wants_receipt = receipts.asks(scope["headers"])
        self.receipt: str | None = None
        """Receipt from the prefill server of the last attempt."""
        self.stream = bool(body.get("stream", False))
        asked = body.get("return_logprob")
        self.logprobs = any(asked) if isinstance(asked, list) else bool(asked)
        """True if log-probabilities are requested (for any prompt of a batch)."""
        self.batch_size = batch = batch_size(endpoint, body)
        """Number of bootstrap rooms of a batch, one for each prompt; None for a single prompt. Given one room, SGLang
        would count up from it, but the room decides which data-parallel rank gets a prompt."""
        try:
            own = None if trail.given else trail.id
            self.ids = Ids(body.get("rid"), batch, own, self.headers.get("authorization"))
        except ValueError as e:
            raise BadRequest(f"rid: {e}") from None
        self.length_class: Pool = "short"
        self.first_token_seen = False
        self.prompt: Prompt | None = None
        self.ask = NOTHING
        self.kv_tokens = 0
        """KV tokens that the decode server will hold."""
        texts = self.headers.popall(DEADLINE_HEADER, [])
        self.slo_ms = bodies.read_deadline(texts) if texts else None
        """Deadline for the first token (milliseconds after arrival)."""
        self.refuse_at = math.inf
        """Time from which the request is refused if it has no first token (monotonic seconds)."""
        if self.slo_ms is not None:
            if bodies.read_late(self.headers.popall(bodies.LATE_HEADER, [])):
                self.refuse_at = self.arrived + self.slo_ms / 1e3
            raw, body = bodies.add_deadline(endpoint, raw, body, self.slo_ms)
        self._session = bodies.read_session(self.headers, body)
        self._raw, self._body = raw, body

    @property
    def age_s(self) -> float:
        """Return the time since the request's arrival (seconds)."""
        return time.monotonic() - self.arrived

    def read(self, counter: TokenCounter) -> None:
        """Read and measure the prompt. Of the body, keep only the data that an attempt needs: its bytes, and its
        members' names with whether they have a value."""
        self.prompt = read_prompt(self.endpoint, self._body)
        self.ask = measure(self.prompt, counter, len(self._raw))
        self.kv_tokens = self.ask.total + answer_tokens(self._body) * (self.batch_size or 1)
        self.ask.slo_s, self.ask.refuse_at = None if self.slo_ms is None else self.slo_ms / 1e3, self.refuse_at
        self.ask.session = self._session
        self._raw = bodies.without_routed(self._raw, self._body)
        self._body = {k: v is not None for k, v in self._body.items() if k not in bodies.ROUTED}

    def waiting(self, new: int, threshold: int) -> Waiting:
        """Return the request as input of ``laps_core``'s rules, with ``new`` tokens expected to be computed."""
        due = None if self.slo_ms is None else self.arrived + self.slo_ms / 1e3
        return Waiting(new, self.ask.total - new, self.arrived, due, priority=int(new > threshold))

    def make_bodies(self, prefiller: PrefillInstance, rank: Rank[Any] | None = None) -> tuple[bytes, bytes]:
        """Return the bodies of an attempt for the prefill and the decode server, with new bootstrap rooms.
        The rooms select ``rank`` of the prefill server for all prompts of a batch, unless the client itself names a
        rank."""
        host, port, n = bootstrap_host(prefiller.url), prefiller.bootstrap_port, self.batch_size
        rooms = [random.getrandbits(ROOM_BITS) for _ in range(1 if n is None else n)]
        meeting: dict[str, Any] = {}
        if rank is not None and not bodies.names_rank(self._body, self.headers):
            rooms = [rank.room(room) for room in rooms]
            # Without this member, prefill servers of 0.5.23 match rooms only with ranks of data-parallel attention.
            meeting[bodies.PREFILL_RANK] = rank.number
        meeting |= {
            "bootstrap_host": host if n is None else [host] * n,
            "bootstrap_port": port if n is None else [port] * n,
            "bootstrap_room": rooms[0] if n is None else rooms,
        }
        prefill, decode = (
            bodies.splice(self._raw, self._body, orjson.dumps({**meeting, "rid": rid})) for rid in self.ids.body_ids()
        )
        return prefill, decode

    def forget(self) -> None:
        """Drop the body and the prompt: no other attempt will need them, and a stream can be long."""
        self._raw, self.prompt, self.ask = b"", None, NOTHING
