"""Loads as streams of jobs, some of which follow answers; the same seed gives the same ones.

What ``engine.simulate`` plays. An open one is a list of jobs in order, which is what the client replays.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from benchmark.workloads.job import Job
from benchmark.workloads.lengths import Sizes, uniform

TURNAROUND_S = (0.2e-3, 3e-3)
"""How soon a client in a closed loop sends again: uniform (seconds)."""


class Stream(Protocol):
    """Requests that come by themselves, and requests that follow answers."""

    @property
    def follows(self) -> bool:
        """Whether ``answered`` ever names a next request."""

    def arrivals(self) -> Iterator[Job]:
        """In order of time. May be read once."""

    def answered(self, now: float, job: Job) -> Job | None:
        """The request that follows ``job``, answered at ``now``."""


# -- open loads


def gaps(gap: Callable[[], float], span_s: float) -> list[float]:
    """Arrival times (seconds) from the times between them."""
    times, at = [], gap()
    while at < span_s:
        times.append(at)
        at += gap()
    return times


def poisson(rate_per_s: float, span_s: float, rng: random.Random) -> Iterator[float]:
    """Arrival times (seconds), each drawn when it is asked for."""
    at = rng.expovariate(rate_per_s)
    while at < span_s:
        yield at
        at += rng.expovariate(rate_per_s)


@dataclass
class Open:
    """``n`` requests at ``rate`` per second, whatever comes back.

    ``burst`` 1: a Poisson process. More: bursts of that many on average (geometric), a Poisson process each, whose
    members come ``spacing_s`` apart on average.
    """

    sizes: Sizes
    rate: float
    n: int
    seed: int = 0
    burst: float = 1.0
    spacing_s: float = 1e-3
    slo_s: float | None = None
    follows: bool = False

    def arrivals(self) -> Iterator[Job]:
        """See Stream."""
        rng = random.Random(self.seed)
        times = self._poisson(rng) if self.burst <= 1.0 else iter(self._bursts(rng))
        sizes, slo_s = self.sizes, self.slo_s
        for i, at in enumerate(times):
            yield Job(at, sizes(rng), slo_s=slo_s, number=i)

    def answered(self, now: float, job: Job) -> Job | None:
        """See Stream."""
        return None

    def _poisson(self, rng: random.Random) -> Iterator[float]:
        at, gap = 0.0, random.Random(rng.random())
        for _ in range(self.n):
            at += gap.expovariate(self.rate)
            yield at

    def _bursts(self, rng: random.Random) -> list[float]:
        times: list[float] = []
        at = 0.0
        go_on = 1.0 - 1.0 / self.burst
        while len(times) < self.n:
            at += rng.expovariate(self.rate / self.burst)
            member = at
            times.append(member)
            while rng.random() < go_on:
                member += rng.expovariate(1.0 / self.spacing_s)
                times.append(member)
        return sorted(times)[: self.n]


@dataclass
class Trace:
    """Given jobs. ``stretch``: times are multiplied by it; ``repeat``: how often they are played in a row.

    One with an ``after`` comes when that one is answered, if that is later.
    """

    rows: Sequence[Job]
    stretch: float = 1.0
    repeat: int = 1
    slo_s: float | None = None
    _waiting: dict[int, Job] = field(init=False, default_factory=dict)

    @property
    def follows(self) -> bool:
        """See Stream."""
        return any(job.after is not None for job in self.rows)

    def arrivals(self) -> Iterator[Job]:
        """See Stream."""
        span = self.rows[-1].at_s - self.rows[0].at_s
        for lap in range(self.repeat):
            shift, first = lap * span * (1 + 1 / len(self.rows)), lap * len(self.rows)
            for i, row in enumerate(self.rows, first):
                at_s = (row.at_s + shift) * self.stretch
                job = replace(row, at_s=at_s, number=i, slo_s=row.slo_s if self.slo_s is None else self.slo_s)
                if row.after is None:
                    yield job
                else:
                    self._waiting[first + row.after] = job

    def answered(self, now: float, job: Job) -> Job | None:
        """See Stream."""
        following = self._waiting.pop(job.number, None)
        return None if following is None else replace(following, at_s=max(now, following.at_s))


# -- closed loads


@dataclass
class Closed:
    """``clients`` that each send the next request a turnaround after the last answer, ``n`` requests in all."""

    sizes: Sizes
    clients: int
    n: int
    seed: int = 0
    turnaround_s: tuple[float, float] = TURNAROUND_S
    slo_s: float | None = None
    follows: bool = True
    _rngs: list[random.Random] = field(init=False, default_factory=list)
    _sent: int = field(init=False, default=0)

    def arrivals(self) -> Iterator[Job]:
        """See Stream."""
        # A stream of lengths per client: what a client asks does not depend on who was answered first.
        self._rngs = [random.Random(f"{self.seed}/{i}") for i in range(self.clients)]
        first = [self._next(0.0, i) for i in range(min(self.clients, self.n))]
        return iter(sorted(first, key=lambda job: job.at_s))

    def answered(self, now: float, job: Job) -> Job | None:
        """See Stream."""
        return self._next(now, job.client) if self._sent < self.n else None

    def _next(self, now: float, client: int) -> Job:
        rng = self._rngs[client]
        low, high = self.turnaround_s
        self._sent += 1
        at = now + low + (high - low) * rng.random()
        return Job(at, self.sizes(rng), slo_s=self.slo_s, client=client, number=self._sent)


@dataclass
class Populations:
    """Closed loops of several kinds of clients: (what they ask, how many) each. Never ends by itself."""

    kinds: Sequence[tuple[Sizes, int]]
    seed: int = 0
    turnaround_s: tuple[float, float] = TURNAROUND_S
    follows: bool = True
    _clients: list[tuple[Sizes, random.Random]] = field(init=False, default_factory=list)
    _sent: int = field(init=False, default=0)

    def arrivals(self) -> Iterator[Job]:
        """See Stream."""
        every = [sizes for sizes, n in self.kinds for _ in range(n)]
        self._clients = [(sizes, random.Random(f"{self.seed}/{i}")) for i, sizes in enumerate(every)]
        return iter(sorted((self._next(0.0, i) for i in range(len(every))), key=lambda job: job.at_s))

    def answered(self, now: float, job: Job) -> Job | None:
        """See Stream."""
        return self._next(now, job.client)

    def _next(self, now: float, client: int) -> Job:
        sizes, rng = self._clients[client]
        low, high = self.turnaround_s
        self._sent += 1
        at_s = now + low + (high - low) * rng.random()
        return Job(at_s, sizes(rng), client=client, number=self._sent)


@dataclass
class Jobs:
    """Offline work: ``n`` requests, at most ``clients`` of them under way; the next is sent with each answer.

    What ``Closed`` is without a turnaround: a feeder that keeps a fixed number in flight.
    """

    sizes: Sizes
    clients: int
    n: int
    seed: int = 0
    slo_s: float | None = None
    follows: bool = True

    def arrivals(self) -> Iterator[Job]:
        """See Stream."""
        rng = random.Random(self.seed)
        self._work = iter([self.sizes(rng) for _ in range(self.n)])
        self._sent = 0
        return iter([job for job in (self._next(0.0) for _ in range(self.clients)) if job is not None])

    def answered(self, now: float, job: Job) -> Job | None:
        """See Stream."""
        return self._next(now)

    def _next(self, now: float) -> Job | None:
        tokens = next(self._work, None)
        if tokens is None:
            return None
        self._sent += 1
        return Job(now, tokens, slo_s=self.slo_s, number=self._sent)


@dataclass
class Sessions:
    """Conversations: ``users`` at a time, each a new one when its last is over.

    A turn adds ``turn`` new tokens and later the ``reply`` of the model to the history; the next turn comes ``think_s``
    (exponential, mean) after the answer. The history is cached where the conversation was served before.
    """

    first: Sizes
    turn: Sizes
    users: int
    n: int
    turns: float = 5.0
    """Mean turns of a conversation (geometric)."""
    reply: Sizes = field(default_factory=lambda: uniform(50, 400))
    think_s: float = 5.0
    seed: int = 0
    slo_s: float | None = None
    follows: bool = True
    _history: dict[int, int] = field(init=False, default_factory=dict)
    _session: dict[int, int] = field(init=False, default_factory=dict)
    _sent: int = field(init=False, default=0)
    _count: int = field(init=False, default=0)

    def arrivals(self) -> Iterator[Job]:
        """See Stream."""
        self._rngs = [random.Random(f"{self.seed}/{i}") for i in range(self.users)]
        first = [self._next(0.0, i) for i in range(min(self.users, self.n))]
        return iter(sorted(first, key=lambda job: job.at_s))

    def answered(self, now: float, job: Job) -> Job | None:
        """See Stream."""
        return self._next(now, job.client) if self._sent < self.n else None

    def _next(self, now: float, user: int) -> Job:
        rng = self._rngs[user]
        self._sent += 1
        at = now + rng.expovariate(1.0 / self.think_s)
        if user not in self._session or rng.random() < 1.0 / self.turns:
            self._count += 1
            self._session[user] = self._count
            new, history = self.first(rng), 0
        else:
            history = self._history[user] + self.reply(rng)
            new = self.turn(rng)
        self._history[user] = history + new
        return Job(
            at, new, history, stream=self._session[user], goes_on=True, slo_s=self.slo_s, client=user, number=self._sent
        )
