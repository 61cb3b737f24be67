"""Given traffic: requests with their times, from any source."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from laps_plan.traffic.job import Job
from laps_plan.traffic.streams import chain_conversations, wrap_conversations

POISSON = "Times are Poisson arrivals: real traffic comes in bursts, and more of it then waits."

Lengths = Callable[[random.Random], tuple[int, int]]
"""Function that draws (new tokens, cached tokens) of one request."""


@dataclass(frozen=True)
class Traffic:
    """Requests in order of their times."""

    jobs: Sequence[Job]
    what: str
    """Origin of the traffic, in words."""
    notes: tuple[str, ...] = ()
    """Notes for readers, a sentence each."""
    timed: bool = True
    """True if the times are meaningful; False if the traffic has only a rate once ``at_rate`` sets it."""

    @property
    def rate(self) -> float:
        """Requests per second; 0 = all at once."""
        span_s = self.jobs[-1].at_s - self.jobs[0].at_s
        return (len(self.jobs) - 1) / span_s if span_s > 0.0 else 0.0

    def at_rate(self, rate: float) -> Traffic:
        """Return the same requests at ``rate`` per second, with scaled times."""
        return replace(self, jobs=stretched(self.jobs, self.rate / rate), timed=True)

    def cut(self, requests: int, *, newest: bool) -> Traffic:
        """Return the traffic cut to its first or newest ``requests``."""
        jobs = chain_conversations(self.jobs[-requests:] if newest else self.jobs[:requests])
        if len(jobs) == len(self.jobs):
            return self
        said = f"Only the {'newest' if newest else 'first'} {len(jobs):,} of {len(self.jobs):,} requests are used."
        return replace(self, jobs=jobs, notes=(*self.notes, said))


def stretched(jobs: Sequence[Job], factor: float) -> list[Job]:
    """Return the jobs with ``factor`` times the time between them; the first comes at 0. Only the starts of
    conversations are scaled: the pauses within them are the clients'."""
    first_s = jobs[0].at_s
    moved: list[Job] = []
    begun: dict[int, float] = {}
    for job in jobs:
        begin_s = begun.setdefault(job.stream, job.at_s) if job.continues_stream else job.at_s
        moved.append(replace(job, at_s=(begin_s - first_s) * factor + job.at_s - begin_s))
    return wrap_conversations(moved, (jobs[-1].at_s - first_s) * factor) if begun else moved


def poisson(lengths: Lengths, requests: int, what: str, *, rate: float = 1.0, seed: int = 0, **more: bool) -> Traffic:
    """Return ``requests`` requests of these lengths at Poisson times, ``rate`` per second. ``more``: see Traffic."""
    rng = random.Random(seed)
    jobs, at = [], 0.0
    for _ in range(requests):
        at += rng.expovariate(rate)
        new, cached = lengths(rng)
        jobs.append(Job(at, new, cached))
    return Traffic(jobs, what, (POISSON,), **more)
