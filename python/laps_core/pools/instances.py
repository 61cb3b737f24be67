"""Servers behind the router, with their health and work in flight."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

from laps_core.length import SHORT, ClassName
from laps_core.pools.breaker import Breaker
from laps_core.pools.ranks import Rank

Role = Literal["prefill", "decode"]
Clock = Callable[[], float]

REST_S = 1.0
"""Time for which an instance is avoided after a fault of the router's machine (seconds)."""
RECENT = 0.1
"""Weight of the newest answer in an instance's latency."""
TOGETHER_S = 5.0
"""Requests that an instance loses within this time count as lost together (seconds)."""


class Leg(Protocol):
    """Half of a request, at one of its two servers."""

    def cancel(self) -> object: ...


class Instance:
    """A prefill or decode server: address, health, and this router's work in flight at the server."""

    def __init__(self, url: str, role: Role, clock: Clock) -> None:
        self.url = url.rstrip("/")
        self.role = role
        self.healthy = True
        self.unknown = False
        """True between the start of a new server process and its first probe."""
        self.failures = 0
        """Consecutive failed requests: lost connections and time-outs."""
        self.outstanding_tokens = 0
        """Tokens in flight: new tokens at a prefill server, KV tokens at a decode server."""
        self.served = 0
        """Requests sent to the instance so far."""
        self.served_tokens = 0
        self.lost = 0
        """Requests whose connection was lost."""
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
        """Start of the present period with work in flight; valid only while there is work."""
        self.busy_s = 0.0
        """Total time with work in flight before that period (seconds)."""

    @property
    def outstanding(self) -> int:
        """Return the number of requests in flight."""
        return len(self.leases)

    @property
    def usable(self) -> bool:
        """Return True if a new request may be sent to the instance."""
        return (
            self.healthy and self.breaker.admits() and (self._rests_until is None or self.clock() >= self._rests_until)
        )

    def heard(self) -> None:
        self.heard_at = self.clock()

    def note_answer(self, seconds: float) -> None:
        """Record a good answer. ``seconds``: time since the request was sent (prefill server), or since its prefill
        (decode server)."""
        self.answers += 1
        self.answers_s += seconds
        before = seconds if self.latency_s is None else self.latency_s
        self.latency_s = before + RECENT * (seconds - before)

    def rest(self) -> None:
        """Avoid the instance for REST_S, without counting a failure."""
        self._rests_until = self.clock() + REST_S

    def note_lost(self) -> bool:
        """Record a lost request; return True if it need not be the cause: other requests were in flight or lost."""
        now, before = self.clock(), self._lost_at
        self._lost_at = now
        return self.outstanding > 0 or now - before < TOGETHER_S

    def cut(self) -> None:
        """Cancel all requests that wait for their first token from the instance."""
        for lease in list(self.leases):
            if lease.leg is not None:
                lease.leg.cancel()

    def busy_seconds(self) -> float:
        """Return the total time with work in flight (seconds)."""
        return self.busy_s + (self.clock() - self.busy_since if self.leases else 0.0)

    def lease(
        self, tokens: int, length_class: ClassName = SHORT, work_s: float = 0.0, rank: Rank[Any] | None = None
    ) -> Lease:
        """Return a lease for a request of ``tokens`` and ``work_s`` (seconds), at ``rank`` if the server has several.
        The work counts as in flight from the start of the lease's ``with`` block until the lease ends."""
        return Lease(self, tokens, length_class, work_s, rank)

    def forget(self) -> None:
        """Forget the state of the server's memory (hook): another process may run there from now on."""

    def entered(self, lease: Lease) -> None:
        """Note that a request is being sent (hook)."""

    def left(self, lease: Lease, answered: bool) -> None:
        """Note that a request has been answered, or has failed (hook)."""


@dataclass(eq=False, slots=True)
class Lease:
    """Work of one request at one instance. A lease ends once: by ``end``, or at the latest with its ``with`` block."""

    instance: Instance
    tokens: int
    length_class: ClassName = SHORT
    work_s: float = 0.0
    """Work added to the server (seconds)."""
    rank: Rank[Any] | None = None
    """Rank of the server, if it has several."""
    leg: Leg | None = None
    """Task that runs until the first token has come, or the whole reply if it is not streamed."""
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
        # A lease that is still open has failed: the latency model must not learn from its time.
        self.end(answered=False)


T = TypeVar("T", bound=Instance)


def open_to(instances: Sequence[T], avoid: Collection[Instance]) -> list[T]:
    """Return the instances that a request may go to. If no instance outside ``avoid`` admits requests, open breakers
    are ignored: a failing server is better than none. Instances in ``avoid`` are used only if no other is healthy."""
    usable = [i for i in instances if i.usable and i not in avoid]
    if usable:
        return usable
    healthy = [i for i in instances if i.healthy]
    return [i for i in healthy if i not in avoid] or healthy
