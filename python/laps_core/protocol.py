"""Messages between a prefill server with LAPS and the router. Their names and keys are defined only here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from laps_core.latency.step import Coefficients

STATUS_ROUTE = "laps_status"
"""``GET`` route of a prefill server: returns a ``Status``. The router returns its own status under the same name."""
MAX_AGE = "max_age_s"
"""Parameter of STATUS_ROUTE: largest accepted age of the answer (seconds)."""

POOL_ROUTE = "laps_pool"
"""``POST`` route of a prefill server: takes a ``PoolChange``; returns 200 and the new record, or 409 and the old."""
Assignment = Literal["short", "long", "both"]
"""Pool of a prefill server, or both pools."""

DEADLINE_HEADER = "x-sgl-ttft-slo-ms"
"""Header to the router: the client's deadline for the first token (milliseconds after arrival; see ``deadline``)."""
DEADLINE_FIELD = "ttft_slo_ms"
"""Key of SGLang's custom sampling parameters: this deadline in requests to a prefill server (milliseconds)."""


Count = Annotated[int, msgspec.Meta(ge=0)]


class ByClass(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of each class."""

    short: float
    long: float

    @classmethod
    def mean(cls, ranks: Sequence[ByClass | None]) -> ByClass | None:
        """Return the mean over the data-parallel ranks of one server; None if any rank has no value."""
        said = [r for r in ranks if r is not None]
        if not said or len(said) < len(ranks):
            return None
        return cls(short=sum(r.short for r in said) / len(said), long=sum(r.long for r in said) / len(said))


class Load(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Load of one prefill server: the signals of Algorithm 2 (LAPS, s3.2)."""

    backlog_tokens: float
    """q_k: new tokens waiting to be prefilled."""
    slo_deviation: float
    """e_k: mean relative overshoot of TTFT over its deadline (>= 0)."""
    busy_share: float
    """u_k: share of recent time in which the device was busy (0..1)."""
    backlog_s: ByClass | None = None
    """Predicted device time of the work of each class that waits or is in progress (seconds)."""
    busy_s: ByClass | None = None
    """Device time spent on each class since the start (seconds)."""

    def rounded(self) -> dict[str, float]:
        """Return the three signals, rounded for people (JSON-ready)."""
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
    """Requests of similar length: the most new tokens of a bucket are sqrt(2) times those of the bucket before."""

    up_to: Count
    """Most new tokens of a request in this bucket."""
    requests: Count
    new_tokens: Count
    """Sum over the requests."""
    cached_tokens: Count
    """Sum over the requests of their tokens in the prefix cache on arrival."""


class Lengths(msgspec.Struct, frozen=True, kw_only=True):
    """Lengths of the requests that arrived since the start."""

    seconds: Annotated[float, msgspec.Meta(ge=0.0)]
    """Time since the start."""
    buckets: list[Bucket]
    """Buckets by ascending length, without empty ones."""

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
    """Pool of a prefill server. The server itself keeps this record for all routers."""

    assignment: Assignment | None = None
    """None = not set since the server started."""
    version: Count = 0
    """Number of times that the record was set."""


class PoolChange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Compare-and-set request: applies only if the record still has the version ``if_version``."""

    assignment: Assignment
    if_version: Count

    def of(self, record: PoolRecord) -> PoolRecord | None:
        """Return the record that replaces ``record``; None if ``record`` has another version."""
        if record.version != self.if_version:
            return None
        return PoolRecord(assignment=self.assignment, version=record.version + 1)


class GroupStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Joint plan of the data-parallel attention ranks of a server."""

    on: bool = False
    steps: Count = 0
    """Steps planned together so far."""
    budget_s: float | None = None
    """Predicted time of the last step (seconds); None = no step yet."""
    waiting_share: float | None = None
    """Share of all ranks' time that is spent waiting for the slowest rank (0..1); None = no step yet."""


class RankStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Status of one data-parallel rank, which has its own scheduler, queue and prefix cache."""

    dp_rank: Count = 0
    load: Load | None = None
    group: GroupStatus | None = None


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """Part of a status that routers (of servers) and planners (of servers and routers) read; the rest is for people."""

    enabled: bool
    version: str = ""
    """Version of sglang-laps."""
    load: Load | None = None
    """None if LAPS is off, and for a router."""
    lengths: Lengths | None = None
    """None if LAPS is off."""
    model: Coefficients | None = None
    """Latency model of the server; None if unknown, and for a router."""
    longest: Count | None = None
    """Tokens of the longest prompt that the server takes; None if unknown."""
    holds: Count | None = None
    """Tokens that the prefix cache (of each rank) can hold, including host memory; None if unknown."""
    pool: PoolRecord | msgspec.UnsetType = msgspec.UNSET
    """Pool record; only a prefill server has one."""
    dp_size: Count | msgspec.UnsetType = msgspec.UNSET
    """Only for a prefill server: a request goes to the data-parallel rank ``bootstrap_room`` modulo this number; 1:
    there is one rank, or another rule selects the rank."""
    age_s: Annotated[float, msgspec.Meta(ge=0.0)] = 0.0
    """Age of this status (seconds)."""
    ranks: list[RankStatus] | msgspec.UnsetType = msgspec.UNSET
    """Status of each data-parallel rank, if the server has several."""

    def as_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = msgspec.to_builtins(self)
        return found


def read_status(said: bytes | Mapping[str, Any]) -> Status:
    """Read a server's status; see ``read``."""
    return read(said, Status)


T = TypeVar("T", bound=msgspec.Struct)


def read(said: bytes | Mapping[str, Any], kind: type[T]) -> T:
    """Convert ``said`` (JSON from the network, or a mapping made by this process) to ``kind``. Raises ValueError if it
    does not match. Numbers from JSON are never infinite or NaN."""
    try:
        if isinstance(said, bytes):
            return msgspec.json.decode(said, type=kind)
        return msgspec.convert(said, kind)
    except (msgspec.MsgspecError, RecursionError) as e:
        raise ValueError(str(e)) from None
