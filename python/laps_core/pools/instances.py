"""Servers behind the router, with their health and work in flight."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

from laps_core.latency.step import Coefficients
from laps_core.length import SHORT, ClassName
from laps_core.pools.breaker import Breaker
from laps_core.pools.outlook import Learnt, Outlook
from laps_core.pools.prefixes import PrefixIndex
from laps_core.pools.pressure import BOTH
from laps_core.pools.ranks import RANKS_MAX, Rank
from laps_core.protocol import Assignment, PoolRecord
from laps_core.slo import overshoot

Role = Literal["prefill", "decode"]
Clock = Callable[[], float]

SPAN_S = 5.0
"""Averaging time of the router's own view of an instance, about (seconds)."""
REST_S = 1.0
"""Time for which an instance is passed over after a fault of this machine (seconds)."""
RECENT = 0.1
"""Weight of the newest answer in an instance's latency."""
PREFIX_TOKENS = 1 << 20
"""Size of the prefix index for a server that does not report its prefix cache (tokens)."""
PREFIX_TOKENS_MOST = 1 << 24
"""Limit of the prefix index of a server, whatever it reports (tokens): it takes 35 MB here."""
TOGETHER_S = 5.0
"""Requests that an instance loses within this time count as lost together (seconds)."""


class Leg(Protocol):
    """Half of a request, at one of its two servers."""

    def cancel(self) -> object:
        """End it."""
        ...


class Instance:
    """A prefill or decode server: address, health, and this router's work in flight there."""

    def __init__(self, url: str, role: Role, clock: Clock) -> None:
        self.url = url.rstrip("/")
        self.role = role
        self.healthy = True
        self.unknown = False
        """True until the process there now has been probed."""
        self.failures = 0
        """Requests that failed in a row: lost connections, time-outs."""
        self.outstanding_tokens = 0
        """New tokens in flight."""
        self.served = 0
        """Requests sent to the instance so far."""
        self.served_tokens = 0
        self.lost = 0
        """Requests that ended with their connection."""
        self.errors = 0
        """Requests answered with 5xx, or not in time."""
        self.answers, self.answers_s = 0, 0.0
        """Number of good answers, and their total time (seconds)."""
        self.latency_s: float | None = None
        """Moving average of recent answer times (seconds)."""
        self.proven = False
        """True once the instance has passed a probe or answered well."""
        self.breaker = Breaker(clock=clock)
        self.heard_at = clock()
        """Time of the last data from the instance."""
        self.leases: set[Lease] = set()
        self._rests_until: float | None = None
        self._lost_at = -math.inf
        self.clock = clock
        self.busy_since = 0.0
        """Start of the present period with work in flight, if there is one."""
        self.busy_s = 0.0
        """Total time with work in flight before that period (seconds)."""

    @property
    def outstanding(self) -> int:
        """Return the number of requests in flight."""
        return len(self.leases)

    @property
    def usable(self) -> bool:
        """Return True if a new request may be sent there."""
        return (
            self.healthy and self.breaker.admits() and (self._rests_until is None or self.clock() >= self._rests_until)
        )

    def heard(self) -> None:
        """Record that the instance has sent data."""
        self.heard_at = self.clock()

    def note_answer(self, seconds: float) -> None:
        """Record a good answer: time since the request was sent for a prefill server, since its prefill for a decode
        server."""
        self.answers += 1
        self.answers_s += seconds
        before = seconds if self.latency_s is None else self.latency_s
        self.latency_s = before + RECENT * (seconds - before)

    def rest(self) -> None:
        """Pass the instance over for a moment, without counting a failure."""
        self._rests_until = self.clock() + REST_S

    def note_lost(self) -> bool:
        """Record a lost request; return True if others were there with it, so that it need not be the cause."""
        now, before = self.clock(), self._lost_at
        self._lost_at = now
        return self.outstanding > 0 or now - before < TOGETHER_S

    def cut(self) -> None:
        """Cancel all requests that wait for their first token there."""
        for lease in list(self.leases):
            if lease.leg is not None:
                lease.leg.cancel()

    def busy_seconds(self) -> float:
        """Return the time with anything in flight since the start (seconds)."""
        return self.busy_s + (self.clock() - self.busy_since if self.leases else 0.0)

    def lease(
        self,
        tokens: int,
        length_class: ClassName = SHORT,
        work_s: float = 0.0,
        rank: Rank[PrefillInstance] | None = None,
    ) -> Lease:
        """Account for a request of ``tokens`` new tokens and ``work_s`` (seconds), at ``rank`` if it has several, until
        the lease ends."""
        return Lease(self, tokens, length_class, work_s, rank)

    def forget(self) -> None:
        """Forget the state of its memory: another process may be there from now on."""

    def entered(self, lease: Lease) -> None:
        """Hook: a request is being sent."""

    def left(self, lease: Lease, answered: bool) -> None:
        """Hook: a request has been answered, or has failed."""


class PrefillInstance(Instance):
    """A prefill server: member of one pool or of both, with an index of the prefixes it has cached."""

    def __init__(
        self,
        url: str,
        bootstrap_port: int | None,
        pool: Assignment = BOTH,
        *,
        clock: Clock,
        learnt: Learnt | None = None,
    ) -> None:
        """``learnt``: latency model for servers that report none, shared within one router."""
        super().__init__(url, "prefill", clock)
        self.bootstrap_port = bootstrap_port
        self.pool: Assignment = pool
        self.record: PoolRecord | None = None
        """Pool record stored by the server; None if it stores none."""
        self.taken_at = -math.inf
        """Time at which that was last read."""
        self.prefixes = PrefixIndex(PREFIX_TOKENS)
        self._learnt = learnt or Learnt()
        self.outlook = Outlook(self._learnt)
        """Predicts when the server would answer a request; with several ranks, their mean."""
        self.places: tuple[Place, ...] = (self,)
        """Targets for requests: its data-parallel ranks, or itself if it has one."""
        self.server = self
        self.rank: Rank[PrefillInstance] | None = None
        """None, as this place is no rank."""
        self.longest: int | None = None
        """Longest prompt that the server's memory holds (tokens); None if unknown."""
        self._deviation = 0.0
        self._deviation_at = clock()

    def take(self, record: PoolRecord | None) -> None:
        """Adopt the server's own pool record, which counts for all routers."""
        self.record, self.taken_at = record, self.clock()
        if record and record.assignment:
            self.pool = record.assignment

    @property
    def prefix_blocks(self) -> int:
        """Return the number of blocks in its prefix indexes."""
        return sum(len(p.prefixes) for p in self.places)

    def spread(self, ranks: int) -> None:
        """Set the number of data-parallel ranks that requests are spread over by room. A new number makes new ranks."""
        ranks = ranks if 1 < ranks <= RANKS_MAX else 1
        if ranks == len(self.places):
            return
        self.prefixes.clear()
        self.places = (self,)
        if ranks > 1:
            self.places = tuple(Rank(self, n, ranks, self._learnt, PREFIX_TOKENS) for n in range(ranks))

    def remembers(self, tokens: int | None) -> None:
        """Set the size of each of its prefix caches (tokens); None if unknown."""
        tokens = PREFIX_TOKENS if tokens is None else min(tokens, PREFIX_TOKENS_MOST)
        for p in self.places:
            p.prefixes.bound(tokens if p.rank is None else p.rank.share(tokens))

    def is_known(self, parks: bool, model: Coefficients | None, longest: int | None) -> None:
        """Set the server's report: whether it runs LAPS, its latency model, and the longest prompt; None if unknown."""
        self.longest = longest
        for o in (self.outlook, *(p.outlook for p in self.places)):
            o.parks, o.own_model = parks, model

    def flushed(self) -> None:
        """Empty the prefix indexes."""
        for p in self.places:
            p.prefixes.clear()

    def forget(self) -> None:
        """Forget prefixes and ranks."""
        self.flushed()
        self.spread(1)

    def entered(self, lease: Lease) -> None:
        """Add the request to the outlook."""
        rank, work_s = lease.rank, lease.work_s
        now = self.clock()
        if rank is not None:
            rank.entered(now, lease.tokens, lease.length_class, work_s)
            work_s /= rank.of
        self.outlook.enter(now, lease.length_class, work_s)

    def left(self, lease: Lease, answered: bool) -> None:
        """Remove the request from the outlook."""
        rank, work_s, tokens = lease.rank, lease.work_s, lease.tokens if answered else 0
        now = self.clock()
        if rank is not None:
            rank.left(now, lease.tokens, lease.length_class, work_s, answered)
            # The rank's outlook has learnt from it already.
            work_s, tokens = work_s / rank.of, 0
        self.outlook.leave(now, lease.length_class, work_s, tokens)

    def note_ttft(self, seconds: float, slo_s: float) -> None:
        """Record one time to first token and its deadline (seconds)."""
        keep = 0.8 * self._fading()
        self._deviation = self._deviation * keep + overshoot(seconds, slo_s) * (1 - keep)
        self._deviation_at = self.clock()

    def _fading(self) -> float:
        return float(2.0 ** (-(self.clock() - self._deviation_at) / SPAN_S))

    @property
    def deviation(self) -> float:
        """Return the mean relative overshoot of deadlines seen by this router (ratio); without new ones it halves every
        few seconds."""
        return self._deviation * self._fading()


Place = PrefillInstance | Rank[PrefillInstance]
"""Target of a request: a prefill server, or one of its data-parallel ranks."""


@dataclass(eq=False, slots=True)
class Lease:
    """Work handed to one instance. It ends once: by ``end``, or at the latest with its ``with`` block."""

    instance: Instance
    tokens: int
    length_class: ClassName = SHORT
    work_s: float = 0.0
    """Work added to the server (seconds)."""
    rank: Rank[PrefillInstance] | None = None
    """Rank of the server, if it has several."""
    leg: Leg | None = None
    """Task that runs until the first token has come."""
    _trial: bool = False

    def __enter__(self) -> Lease:
        i = self.instance
        self._trial = i.breaker.enter()
        if not i.leases:
            i.busy_since = i.clock()
        i.leases.add(self)
        i.entered(self)
        i.outstanding_tokens += self.tokens
        i.served += 1
        i.served_tokens += self.tokens
        return self

    def end(self, answered: bool = True) -> None:
        """Remove the work from the instance; later calls do nothing."""
        i = self.instance
        if self not in i.leases:
            return
        i.leases.discard(self)
        i.left(self, answered)
        i.outstanding_tokens -= self.tokens
        if not i.leases:
            i.busy_s += i.clock() - i.busy_since
        if self._trial:
            i.breaker.leave()

    def __exit__(self, *_: object) -> None:
        # A lease that ends here has failed, and its time teaches nothing.
        self.end(answered=False)


T = TypeVar("T", bound=Instance)


def open_to(instances: Sequence[T], avoid: Collection[Instance]) -> list[T]:
    """Return the instances that a request may go to. Instances in ``avoid`` are used only without any other; open
    breakers are ignored if no other instance is left: a failing server is better than none."""
    usable = [i for i in instances if i.usable and i not in avoid]
    if usable:
        return usable
    healthy = [i for i in instances if i.healthy]
    return [i for i in healthy if i not in avoid] or healthy
