"""Messages between a prefill server with LAPS and the router. No other module spells a name or a key of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from laps_core.latency.step import Coefficients

STATUS_ROUTE = "laps_status"
"""``GET`` it of a prefill server for a ``Status``. The router answers under the same name with a status of its own."""
MAX_AGE = "max_age_s"
"""Parameter of that route: the answer may be as old as this (seconds)."""

POOL_ROUTE = "laps_pool"
"""``POST`` a ``PoolChange`` to a prefill server: 200 with the record it made, or 409 with the one that it did not."""
Assignment = Literal["short", "long", "both"]
"""The pool that a prefill server is in, or both."""

DEADLINE_HEADER = "x-sgl-ttft-slo-ms"
"""A client's deadline for the first token, to the router (milliseconds after arrival; see ``deadline``)."""
DEADLINE_FIELD = "ttft_slo_ms"
"""The same to a prefill server: a key of SGLang's custom sampling parameters (milliseconds after arrival)."""


Count = Annotated[int, msgspec.Meta(ge=0)]


class ByClass(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of each class."""

    short: float
    long: float

    @classmethod
    def mean(cls, ranks: Sequence[ByClass | None]) -> ByClass | None:
        """Return the mean over the data-parallel ranks of one server; None where one of them says nothing."""
        said = [r for r in ranks if r is not None]
        if not said or len(said) < len(ranks):
            return None
        return cls(short=sum(r.short for r in said) / len(said), long=sum(r.long for r in said) / len(said))


class Load(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How loaded one prefill server is: the signals of Algorithm 2 (LAPS, s3.2)."""

    backlog_tokens: float
    """q_k: new tokens waiting to be prefilled."""
    slo_deviation: float
    """e_k: mean relative overshoot of TTFT over its deadline (>= 0)."""
    busy_share: float
    """u_k: share of recent time the device was busy (0..1)."""
    backlog_s: ByClass | None = None
    """Work of each class that waits or is in progress, by the server's latency model (seconds of its device)."""
    busy_s: ByClass | None = None
    """Device time on each class since the start (seconds)."""

    def rounded(self) -> dict[str, float]:
        """The three signals for people, JSON-ready."""
        return {name: round(getattr(self, name), 4) for name in ("backlog_tokens", "slo_deviation", "busy_share")}

    @classmethod
    def of_ranks(cls, loads: Sequence[Load]) -> Load:
        """Return the load of a server with these data-parallel ranks (at least one)."""
        return cls(
            backlog_tokens=sum(x.backlog_tokens for x in loads),
            slo_deviation=max(x.slo_deviation for x in loads),
            busy_share=sum(x.busy_share for x in loads) / len(loads),
            backlog_s=ByClass.mean([x.backlog_s for x in loads]),
            busy_s=ByClass.mean([x.busy_s for x in loads]),
        )


IDLE = Load(backlog_tokens=0.0, slo_deviation=0.0, busy_share=0.0)


class Bucket(msgspec.Struct, frozen=True, kw_only=True):
    """Requests of about the same length: more new tokens than the bucket before holds, up to sqrt(2) times as many."""

    up_to: Count
    """Most new tokens of a request in it."""
    requests: Count
    new_tokens: Count
    """New tokens of all of them."""
    cached_tokens: Count
    """Tokens of all of them in the prefix cache when they came."""


class Lengths(msgspec.Struct, frozen=True, kw_only=True):
    """How long the requests were that came since the start."""

    seconds: Annotated[float, msgspec.Meta(ge=0.0)]
    """Since the start."""
    buckets: list[Bucket]
    """By length; those without a request are left out."""

    @classmethod
    def of_ranks(cls, ranks: Sequence[Lengths]) -> Lengths:
        """Return the lengths of all data-parallel ranks of one server (at least one)."""
        sums: dict[int, Bucket] = {}
        for b in (b for lengths in ranks for b in lengths.buckets):
            a = sums.get(b.up_to, Bucket(up_to=b.up_to, requests=0, new_tokens=0, cached_tokens=0))
            sums[b.up_to] = Bucket(
                up_to=b.up_to,
                requests=a.requests + b.requests,
                new_tokens=a.new_tokens + b.new_tokens,
                cached_tokens=a.cached_tokens + b.cached_tokens,
            )
        return cls(seconds=max(x.seconds for x in ranks), buckets=[sums[k] for k in sorted(sums)])


class PoolRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Which pool a prefill server is in, as the server itself keeps it for all routers."""

    assignment: Assignment | None = None
    """None: nobody has set it since the server started."""
    version: Count = 0
    """How often it was set."""


class PoolChange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Compare and set: it counts only if nobody has set the record since it was seen at this version."""

    assignment: Assignment
    if_version: Count

    def of(self, record: PoolRecord) -> PoolRecord | None:
        """Return the record that ``record`` becomes; None where it has another version."""
        if record.version != self.if_version:
            return None
        return PoolRecord(assignment=self.assignment, version=record.version + 1)


class GroupStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The plan that a data-parallel attention rank shares with the others."""

    on: bool = False
    steps: Count = 0
    """Planned together so far."""
    budget_s: float | None = None
    """Predicted time of the last one (seconds); None = there was none."""
    waiting_share: float | None = None
    """Share of all ranks' time that is spent waiting for the slowest (0..1); None = no step yet."""


class RankStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Status of one data-parallel rank: a scheduler with a queue and a prefix cache of its own."""

    dp_rank: Count = 0
    load: Load | None = None
    group: GroupStatus | None = None


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a server's status that a router relies on, and a planner in the status of either; a status has more,
    for people."""

    enabled: bool
    version: str = ""
    """Version of sglang-laps."""
    load: Load | None = None
    """None where LAPS is off, and of a router."""
    lengths: Lengths | None = None
    """None where LAPS is off."""
    model: Coefficients | None = None
    """Latency model of the server; None if unknown, and for a router."""
    longest: Count | None = None
    """Most tokens of a prompt that its memory holds; None = not told."""
    holds: Count | None = None
    """Tokens that its prefix cache holds, in host memory too; of each rank where there are several. None = not told."""
    pool: PoolRecord | msgspec.UnsetType = msgspec.UNSET
    """Pool record, for a prefill server alone."""
    dp_size: Count | msgspec.UnsetType = msgspec.UNSET
    """Data-parallel ranks, for a prefill server alone: a request goes to the data-parallel rank ``bootstrap_room``
    modulo this. 1: there is one rank, or another rule says which."""
    age_s: Annotated[float, msgspec.Meta(ge=0.0)] = 0.0
    """How long ago all this was so (seconds)."""
    ranks: list[RankStatus] | msgspec.UnsetType = msgspec.UNSET
    """Status of each of its data-parallel ranks, if it has several."""

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        return found


def read_status(said: bytes | Mapping[str, Any]) -> Status:
    """A server's status as it came over the wire, or as this process has made it. Raises as ``read``."""
    return read(said, Status)


T = TypeVar("T", bound=msgspec.Struct)


def read(said: bytes | Mapping[str, Any], kind: type[T]) -> T:
    """Return ``said``, which came over the wire or was made by this process, as ``kind``. Raises ValueError for
    anything else.

    Raises ValueError where it is something else. No number that came over the wire is infinite or NaN.
    """
    try:
        if isinstance(said, bytes):
            return msgspec.json.decode(said, type=kind)
        return msgspec.convert(said, kind)
    except msgspec.MsgspecError as e:
        raise ValueError(str(e)) from None
