"""Decode servers: how full their KV caches are, and which of them has the most room."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from .instances import Clock, Instance

OTHERS_MAX = 16.0
"""Most that other routers are taken to send beside this one (ratio)."""


@dataclass(frozen=True, slots=True)
class Kv:
    """Of one decode server, when it was last read (tokens)."""

    told: int
    """Taken by requests, or asked for by those that wait for room, whichever router has sent them."""
    capacity: int
    """Of all its data-parallel ranks."""
    holds: int
    """Of one of them: no request may need more."""
    own: int
    """What this router had in flight there."""

    @property
    def taken(self) -> int:
        """With what this router has sent and answers are still to need."""
        return max(self.told, self.own)


class DecodeInstance(Instance):
    """A decode server, and what it says of its KV cache."""

    def __init__(self, url: str, clock: Clock = time.monotonic) -> None:
        super().__init__(url, "decode", clock)
        self.kv: Kv | None = None
        """None: it has not said."""

    def held(self, others: float = 1.0) -> float:
        """Tokens of its KV that are taken or asked for by now, where ``others`` and this router together send so many
        times what this router does."""
        kv, own = self.kv, self.outstanding_tokens
        if kv is None:
            return own
        return max(own, kv.taken + others * (own - kv.own))

    def forget(self) -> None:
        """See Instance."""
        self.kv = None


def traffic(decoders: Sequence[DecodeInstance]) -> float:
    """How many times this router's work there is at the decode servers in all (1..OTHERS_MAX). What it sends until they
    are read again others are taken to send alongside: or each of many routers would fill the same server."""
    read = [d.kv for d in decoders if d.kv is not None]
    taken, own = sum(k.taken for k in read), sum(k.own for k in read)
    return min(taken / own, OTHERS_MAX) if own else OTHERS_MAX if taken else 1.0


def roomiest(decoders: Sequence[DecodeInstance], tokens: int, others: float) -> DecodeInstance:
    """Of decode servers (at least one) that which has the most KV free for a request of so many ``tokens``; ``others``
    as ``traffic`` says. One that cannot hold it at all is taken only without another.

    One that says nothing is taken to be as large as the smallest that does, and to hold what this router has sent.
    """
    for d in decoders:
        if d.kv is not None:
            break
    else:
        return min(decoders, key=lambda d: (d.outstanding_tokens, d.outstanding, d.served))
    usual = min(d.kv.capacity for d in decoders if d.kv is not None)
    able = [d for d in decoders if d.kv is None or tokens <= d.kv.holds] or decoders
    return min(
        able, key=lambda d: (d.held(others) - (usual if d.kv is None else d.kv.capacity), d.outstanding, d.served)
    )
