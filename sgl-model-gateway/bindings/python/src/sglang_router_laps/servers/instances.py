"""The servers behind the router, and what each has in flight."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from laps_core.latency.step import Coefficients
from laps_core.length import SHORT, ClassName
from laps_core.pools.outlook import Learnt, Outlook
from laps_core.pools.pressure import BOTH, Assignment
from laps_core.protocol import PoolRecord
from laps_core.slo import overshoot
from yarl import URL

from ..prompts.prefixes import PrefixIndex
from .breaker import Breaker
from .ranks import RANKS_MAX, Rank

Role = Literal["prefill", "decode"]
Clock = Callable[[], float]

SPAN_S = 5.0
"""Over about how long the router's own view of an instance is averaged (seconds)."""
REST_S = 1.0
"""How long an instance that could not be reached for a reason of this machine's is passed over (seconds)."""
RECENT = 0.1
"""Weight of the newest answer in an instance's latency."""
PREFIX_TOKENS = 1 << 20
"""Bound of the prefix index of a server that does not say what its prefix cache holds (tokens)."""
PREFIX_TOKENS_MOST = 1 << 24
"""No server's prefix index holds more, whatever it says (tokens): as much takes 35 MB here."""
TOGETHER_S = 5.0
"""Requests that an instance loses within this time were lost together (seconds)."""


class Instance:
    """One prefill or decode server: address, health, and work in flight as this router knows it."""

    def __init__(self, url: str, role: Role, clock: Clock = time.monotonic) -> None:
        self.url = url.rstrip("/")
        self.role = role
        self.healthy = True
        self.unknown = False
        """Nobody has asked yet whether what is there now is well."""
        self.failures = 0
        """Requests that failed in a row: connections lost, time-outs."""
        self.outstanding_tokens = 0
        """New tokens in flight."""
        self.served = 0
        """Requests handed to it so far."""
        self.served_tokens = 0
        self.lost = 0
        """Requests that ended because the connection did."""
        self.errors = 0
        """Requests that it answered with 5xx, or not in time."""
        self.answers, self.answers_s = 0, 0.0
        """How many requests it answered well, and how long that took in all (seconds)."""
        self.latency_s: float | None = None
        """What its recent answers took (seconds)."""
        self.proven = False
        """It has been seen to be well."""
        self.breaker = Breaker(clock=clock)
        self.heard_at = clock()
        """When it last sent anything at all."""
        self.suspected = asyncio.Event()
        """It is to be probed at once."""
        self.leases: set[Lease] = set()
        self._rests_until: float | None = None
        self._lost_at = -math.inf
        self.clock = clock
        self.busy_since = 0.0
        """Since when it has had something in flight, while it has."""
        self.busy_s = 0.0
        """Time it has had something in flight, up to then (seconds)."""
        self._urls: dict[str, URL] = {}

    @property
    def outstanding(self) -> int:
        """Requests in flight."""
        return len(self.leases)

    @property
    def usable(self) -> bool:
        """A new request may go there."""
        return (
            self.healthy and self.breaker.admits() and (self._rests_until is None or self.clock() >= self._rests_until)
        )

    def heard(self) -> None:
        """It has sent something."""
        self.heard_at = self.clock()

    def note_answer(self, seconds: float) -> None:
        """It has answered well: a prefill server since the request was sent, a decode server since its prefill."""
        self.answers += 1
        self.answers_s += seconds
        before = seconds if self.latency_s is None else self.latency_s
        self.latency_s = before + RECENT * (seconds - before)

    def rest(self) -> None:
        """Pass it over for a moment, without any blame."""
        self._rests_until = self.clock() + REST_S

    def note_lost(self) -> bool:
        """A request that was there is lost; whether others were with it, so that it need not be what killed it."""
        now, before = self.clock(), self._lost_at
        self._lost_at = now
        return self.outstanding > 0 or now - before < TOGETHER_S

    def cut(self) -> None:
        """End all that waits for its first token there; what awaits such a leg sees it cancelled."""
        for lease in list(self.leases):
            if lease.leg is not None:
                lease.leg.cancel()

    def address(self, path: str) -> URL:
        """The URL of one of its routes, parsed once."""
        found = self._urls.get(path)
        if found is None:
            found = self._urls[path] = URL(f"{self.url}/{path}")
        return found

    def busy_seconds(self) -> float:
        """Time it has had anything in flight since the start (seconds)."""
        return self.busy_s + (self.clock() - self.busy_since if self.leases else 0.0)

    def lease(
        self,
        tokens: int,
        length_class: ClassName = SHORT,
        work_s: float = 0.0,
        rank: Rank[PrefillInstance] | None = None,
    ) -> Lease:
        """Account for a request of ``tokens`` new tokens and so much work (seconds) until the lease ends; at this
        ``rank`` of it, where it has several."""
        return Lease(self, tokens, length_class, work_s, rank)

    def forget(self) -> None:
        """Another process may be there from now on: nothing that was known of its memory holds."""

    def entered(self, lease: Lease) -> None:
        """A request is being sent to it."""

    def left(self, lease: Lease, answered: bool) -> None:
        """That request has what it came for, or has failed."""


class PrefillInstance(Instance):
    """A prefill server: a member of one pool or of both, with an index of the prefixes it has seen."""

    def __init__(
        self,
        url: str,
        bootstrap_port: int | None,
        pool: Assignment = BOTH,
        clock: Clock = time.monotonic,
        learnt: Learnt | None = None,
    ) -> None:
        """``learnt``: what is known of servers that say nothing; shared by those of one router."""
        super().__init__(url, "prefill", clock)
        self.bootstrap_host = URL(self.url).host_subcomponent or ""
        self.bootstrap_port = bootstrap_port
        self.pool: Assignment = pool
        self.record: PoolRecord | None = None
        """The pool that the server itself says it is in; None: it keeps no such record."""
        self.taken_at = -math.inf
        """When that was last told."""
        self.prefixes = PrefixIndex(PREFIX_TOKENS)
        self._learnt = learnt or Learnt()
        self.outlook = Outlook(self._learnt)
        """When it would answer a request; of several ranks, the mean."""
        self.places: tuple[Place, ...] = (self,)
        """Where in it a request may be sent: its data-parallel ranks, or itself where it has one."""
        self.server = self
        self.rank: Rank[PrefillInstance] | None = None
        """As each of its places has them: this one is no rank."""
        self.longest: int | None = None
        """Most tokens of a prompt that its memory holds; None: it has not said."""
        self._deviation = 0.0
        self._deviation_at = clock()

    def take(self, record: PoolRecord | None) -> None:
        """What the server itself says counts for all routers."""
        self.record, self.taken_at = record, self.clock()
        if record and record.assignment:
            self.pool = record.assignment

    @property
    def prefix_blocks(self) -> int:
        """How many blocks its prefix indexes hold."""
        return sum(len(p.prefixes) for p in self.places)

    def spread(self, ranks: int) -> None:
        """It deals requests out to so many data-parallel ranks by their rooms. Other ranks than before are new ones."""
        ranks = ranks if 1 < ranks <= RANKS_MAX else 1
        if ranks == len(self.places):
            return
        self.prefixes.clear()
        self.places = (self,)
        if ranks > 1:
            self.places = tuple(Rank(self, n, ranks, self._learnt, PREFIX_TOKENS) for n in range(ranks))

    def remembers(self, tokens: int | None) -> None:
        """Each of its prefix caches holds so many tokens, as it says; None: it does not."""
        tokens = PREFIX_TOKENS if tokens is None else min(tokens, PREFIX_TOKENS_MOST)
        for p in self.places:
            p.prefixes.bound(tokens if p.rank is None else p.rank.share(tokens))

    def is_known(self, parks: bool, model: Coefficients | None, longest: int | None) -> None:
        """Whether it runs LAPS, what a step takes, and the longest prompt: as it says, or None."""
        self.longest = longest
        for o in (self.outlook, *(p.outlook for p in self.places)):
            o.parks, o.own_model = parks, model

    def flushed(self) -> None:
        """Its prefix caches are empty."""
        for p in self.places:
            p.prefixes.clear()

    def forget(self) -> None:
        """See Instance."""
        self.flushed()
        self.spread(1)

    def entered(self, lease: Lease) -> None:
        """See Instance."""
        rank, work_s = lease.rank, lease.work_s
        now = self.clock()
        if rank is not None:
            rank.entered(now, lease.tokens, lease.length_class, work_s)
            work_s /= rank.of
        self.outlook.enter(now, lease.length_class, work_s)

    def left(self, lease: Lease, answered: bool) -> None:
        """See Instance."""
        rank, work_s, tokens = lease.rank, lease.work_s, lease.tokens if answered else 0
        now = self.clock()
        if rank is not None:
            rank.left(now, lease.tokens, lease.length_class, work_s, answered)
            # What it teaches has been learnt there.
            work_s, tokens = work_s / rank.of, 0
        self.outlook.leave(now, lease.length_class, work_s, tokens)

    def note_ttft(self, seconds: float, slo_s: float) -> None:
        """Take in one first token and its deadline (seconds)."""
        keep = 0.8 * self._fading()
        self._deviation = self._deviation * keep + overshoot(seconds, slo_s) * (1 - keep)
        self._deviation_at = self.clock()

    def _fading(self) -> float:
        return 2.0 ** (-(self.clock() - self._deviation_at) / SPAN_S)

    @property
    def deviation(self) -> float:
        """Mean relative overshoot of the deadlines this router saw (ratio): without new ones it halves every few
        seconds."""
        return self._deviation * self._fading()


Place = PrefillInstance | Rank[PrefillInstance]
"""Where a request is sent: a prefill server, or one of its data-parallel ranks."""


@dataclass(eq=False, slots=True)
class Lease:
    """Work handed to one instance. It ends once: by ``end``, or at the latest with its ``with`` block."""

    instance: Instance
    tokens: int
    length_class: ClassName = SHORT
    work_s: float = 0.0
    """What it adds to the server's work (seconds)."""
    rank: Rank[PrefillInstance] | None = None
    """Of a server with several."""
    leg: asyncio.Task[Any] | None = None
    """What runs until the first token has come."""
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
        """Take the work off the instance's account; later calls do nothing."""
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
        # What has not ended by itself has failed, and tells nothing of the time that it takes.
        self.end(answered=False)


T = TypeVar("T", bound=Instance)


def open_to(instances: Sequence[T], avoid: Collection[Instance]) -> list[T]:
    """Those that a request may go to; ones in ``avoid`` only without any other, and open breakers count only
    while another instance is left: a server that fails is better than none."""
    usable = [i for i in instances if i.usable and i not in avoid]
    if usable:
        return usable
    healthy = [i for i in instances if i.healthy]
    return [i for i in healthy if i not in avoid] or healthy
