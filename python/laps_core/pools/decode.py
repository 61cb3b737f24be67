"""Decode servers: KV cache usage, and the choice of the one with the most KV tokens free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from laps_core.pools.instances import Clock, Instance

OTHERS_MAX = 16.0
"""Most traffic of other routers assumed, as a ratio to this router's."""


@dataclass(frozen=True, slots=True)
class Kv:
    """KV tokens of one decode server, when it was last read."""

    told: int
    """Held by requests, or requested by waiting ones, from any router."""
    capacity: int
    """Capacity of all data-parallel ranks together."""
    holds: int
    """Capacity of the largest rank: no request may need more."""
    own: int
    """Tokens that this router had in flight there."""

    @property
    def taken(self) -> int:
        """Return the tokens taken, including those that this router's answers will still need."""
        return max(self.told, self.own)


class DecodeInstance(Instance):
    """A decode server and the state of its KV cache."""

    def __init__(self, url: str, clock: Clock) -> None:
        super().__init__(url, "decode", clock)
        self.kv: Kv | None = None
        """None until the server has reported it."""

    def held(self, others: float = 1.0) -> float:
        """Return the KV tokens held or requested by now, if all routers send ``others`` times what this router
        sends."""
        kv, own = self.kv, self.outstanding_tokens
        if kv is None:
            return own
        return max(own, kv.taken + others * (own - kv.own))

    def forget(self) -> None:
        """Forget the KV report."""
        self.kv = None


def traffic(decoders: Sequence[DecodeInstance]) -> float:
    """Return the ratio of all routers' work at the decode servers to this router's (1..OTHERS_MAX). Until the next
    report the others are assumed to keep sending: else many routers would fill the same server."""
    read = [d.kv for d in decoders if d.kv is not None]
    taken, own = sum(k.taken for k in read), sum(k.own for k in read)
    return min(taken / own, OTHERS_MAX) if own else OTHERS_MAX if taken else 1.0


def roomiest(decoders: Sequence[DecodeInstance], tokens: int, others: float) -> DecodeInstance:
    """Return the decode server (of at least one) with the most KV tokens free for a request of ``tokens``; ``others``
    as from ``traffic``. One that cannot hold the request is chosen only without another.

    A server without a report is taken to be as large as the smallest with one, and to hold what this router sent.
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
