"""Loads as streams of jobs, some of which follow answers; the same seed gives the same jobs.

``engine.simulate`` plays a stream. An open load is a list of jobs in order, which is what the client replays.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from laps_plan.traffic.job import Job
from laps_plan.traffic.lengths import Sizes

TURNAROUND_S = (0.2e-3, 3e-3)
"""Range of the time after which a client in a closed loop sends again: uniform (seconds)."""
SPACING_S = 1e-3
"""Mean time between the requests of a burst (seconds)."""


class Stream(Protocol):
    """Requests with times of their own, and requests that follow answers."""

    @property
    def follows(self) -> bool:
        """Return True if ``answered`` ever names a next request."""

    def arrivals(self) -> Iterator[Job]:
        """Yield the jobs that do not follow an answer, in order of time. Can be read only once."""

    def answered(self, now: float, job: Job) -> Job | None:
        """Return the job that follows ``job``, answered at ``now``; None if no job does."""


# -- open loads


def times(gap: Callable[[], float], span_s: float) -> Iterator[float]:
    """Yield arrival times (seconds) before ``span_s``. ``gap`` draws the time to the next arrival when it is needed."""
    at = gap()
    while at < span_s:
        yield at
        at += gap()


def poisson(rate_per_s: float, span_s: float, rng: random.Random) -> Iterator[float]:
    """Yield the arrival times of a Poisson process (seconds), each drawn when it is needed."""
    return times(lambda: rng.expovariate(rate_per_s), span_s)


def chain_conversations(jobs: Iterable[Job]) -> list[Job]:
    """Return the jobs in order of their times; each job of a conversation waits for the previous answer."""
    found: list[Job] = []
    last: dict[int, int] = {}
    for i, job in enumerate(sorted(jobs, key=lambda job: job.at_s)):
        found.append(replace(job, after=last.get(job.stream)) if job.continues_stream else job)
        last[job.stream] = i
    return found


def wrap_conversations(jobs: Iterable[Job], span_s: float) -> list[Job]:
    """Return conversations wrapped around a span: jobs beyond its end move to its beginning, as if their conversation
    had started earlier. So the number of conversations is about the same at all times."""
    pieces: dict[tuple[int, int], int] = {}
    found: list[Job] = []
    for job in jobs:
        lap, at_s = divmod(job.at_s, span_s)
        stream = pieces.setdefault((job.stream, int(lap)), len(pieces))
        found.append(replace(job, at_s=at_s, stream=stream))
    return chain_conversations(found)


@dataclass
class Open:
    """``n`` requests at ``rate`` per second, independent of answers.

    ``burst`` 1: a Poisson process. More: bursts of that many requests on average (geometric), at Poisson times;
    requests of a burst come SPACING_S apart on average.
    """

    sizes: Sizes
    rate: float
    n: int
    seed: int = 0
    burst: float = 1.0
    follows: bool = False

    def arrivals(self) -> Iterator[Job]:
        rng = random.Random(self.seed)
        sizes = self.sizes
        for i, at in enumerate(self._poisson(rng) if self.burst <= 1.0 else self._bursts(rng)):
            yield Job(at, sizes(rng), number=i)

    def answered(self, now: float, job: Job) -> Job | None:
        return None

    def _poisson(self, rng: random.Random) -> Iterator[float]:
        at, gap = 0.0, random.Random(rng.random())
        for _ in range(self.n):
            at += gap.expovariate(self.rate)
            yield at

    def _bursts(self, rng: random.Random) -> list[float]:
        found: list[float] = []
        at = 0.0
        go_on = 1.0 - 1.0 / self.burst
        while len(found) < self.n:
            at += rng.expovariate(self.rate / self.burst)
            member = at
            found.append(member)
            while rng.random() < go_on:
                member += rng.expovariate(1.0 / SPACING_S)
                found.append(member)
        return sorted(found)[: self.n]


@dataclass
class Trace:
    """Given jobs. A job with ``after`` comes a pause after the answer to that job, but not before its own time."""

    rows: Sequence[Job]
    _waiting: dict[int, Job] = field(init=False, default_factory=dict)

    @property
    def follows(self) -> bool:
        return any(job.after is not None for job in self.rows)

    def arrivals(self) -> Iterator[Job]:
        # An answer can come long before its follower's place in the list.
        self._waiting = {row.after: replace(row, number=i) for i, row in enumerate(self.rows) if row.after is not None}
        return (replace(row, number=i) for i, row in enumerate(self.rows) if row.after is None)

    def answered(self, now: float, job: Job) -> Job | None:
        following = self._waiting.pop(job.number, None)
        return None if following is None else replace(following, at_s=max(now + following.pause_s, following.at_s))


# -- closed loads


@dataclass
class Closed:
    """``clients`` that each send the next request a turnaround time after the last answer, ``n`` requests in total."""

    sizes: Sizes
    clients: int
    n: float
    seed: int = 0
    follows: bool = True
    _rngs: list[random.Random] = field(init=False, default_factory=list)
    _sent: int = field(init=False, default=0)

    def arrivals(self) -> Iterator[Job]:
        # Each client has its own random lengths, so that its requests do not depend on the order of answers.
        self._rngs = [random.Random(f"{self.seed}/{i}") for i in range(self.clients)]
        first = [self._next(0.0, i) for i in range(int(min(self.clients, self.n)))]
        return iter(sorted(first, key=lambda job: job.at_s))

    def answered(self, now: float, job: Job) -> Job | None:
        return self._next(now, job.client) if self._sent < self.n else None

    def _next(self, now: float, client: int) -> Job:
        rng = self._rngs[client]
        low, high = TURNAROUND_S
        self._sent += 1
        at = now + low + (high - low) * rng.random()
        return Job(at, self.sizes(rng), client=client, number=self._sent)
