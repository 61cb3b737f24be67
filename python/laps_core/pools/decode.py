"""Decode servers: KV cache usage, and the choice of the server with the most KV tokens free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from laps_core.pools.instances import Clock, Instance

OTHERS_MAX = 16.0
"""Largest assumed ratio of all routers' traffic to this router's."""


@dataclass(frozen=True, slots=True)
class Kv:
    """KV tokens of one decode server at its last report."""

    reported: int
    """KV tokens that requests of all routers hold, or request while they wait."""
    capacity: int
    """Capacity of all data-parallel ranks together."""
    largest_rank: int
    """Capacity of the largest rank: no request can have more."""
    own: int
    """KV tokens of this router's requests that were in flight at the server."""

    @property
    def taken(self) -> int:
        """Return the KV tokens taken, with those that this router's requests will still need for their answers."""
        return max(self.reported, self.own)


class DecodeInstance(Instance):
    """A decode server and the state of its KV cache."""

    def __init__(self, url: str, clock: Clock) -> None:
        super().__init__(url, "decode", clock)
        self.kv: Kv | None = None
        """Last KV report; None if unknown."""

    def held(self, traffic_ratio: float = 1.0) -> float:
        """Return the KV tokens held or requested now, if all routers together send ``traffic_ratio`` times as much as
        this router."""
        kv, own = self.kv, self.outstanding_tokens
        if kv is None:
            return own
        return max(own, kv.taken + traffic_ratio * (own - kv.own))

    def forget(self) -> None:
        self.kv = None


def estimate_traffic_ratio(decoders: Sequence[DecodeInstance]) -> float:
    """Return the ratio of all routers' work at the decode servers to this router's (1..OTHERS_MAX). Other routers are
    assumed to go on sending at this ratio until the next report: otherwise many routers would fill the same server."""
    read = [d.kv for d in decoders if d.kv is not None]
    taken, own = sum(k.taken for k in read), sum(k.own for k in read)
    return min(taken / own, OTHERS_MAX) if own else OTHERS_MAX if taken else 1.0


def choose_decoder(decoders: Sequence[DecodeInstance], tokens: int, traffic_ratio: float) -> DecodeInstance:
    """Return the decode server with the most KV tokens free for a request of ``tokens``; ``traffic_ratio`` as from
    ``estimate_traffic_ratio``. If none of ``decoders`` (not empty) can hold the request, all of them are candidates.

    A server without a report counts as large as the smallest server with one, and holds only this router's requests.
    """
    usual = min((d.kv.capacity for d in decoders if d.kv is not None), default=0)
    able = [d for d in decoders if d.kv is None or tokens <= d.kv.largest_rank] or decoders
    return min(
        able,
        key=lambda d: (d.held(traffic_ratio) - (usual if d.kv is None else d.kv.capacity), d.outstanding, d.served),
    )
