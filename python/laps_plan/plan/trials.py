"""Simulations of setups: on the whole traffic, on stretches of the traffic, at other loads."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from laps_core.config import LapsConfig

from laps_plan.plan.figures import PARTS, Change, Figures, Sample, warm_s
from laps_plan.plan.setup import Question, Setup
from laps_plan.profile import Profile
from laps_plan.sim.metrics import lone_s
from laps_plan.sim.variants import run
from laps_plan.traffic.given import Traffic, stretched
from laps_plan.traffic.job import LONG, SHORT, THRESHOLD, Job
from laps_plan.traffic.streams import Trace, chain_conversations

STRETCHES, STRETCH = 6, 1500
"""Number of stretches of the traffic on which flags are tried, and the requests of each stretch."""
LOADED, LOADED_STRETCH = 3, 2500
"""Number and requests of the stretches on which loads and numbers of servers are tried."""
PER_SERVER, FEWEST, FEW = 500, 200, 50
"""Minimum requests of a stretch: for each server; in total, if requests are slow to simulate, or very slow."""
WHOLE_S, SEARCH_S, SLOW_S = 12.0, 1.0, 5.0
"""Approximate time for simulations of LAPS on the whole traffic, and on all stretches; the most for FEWEST requests of
each stretch (seconds)."""
REQUEST_S, ROUND_S = 25e-6, 9e-6
"""Approximate time to simulate a request, and each slice of a long request (seconds)."""
LEAST = 300
"""Minimum requests of the whole traffic that can be simulated in WHOLE_S."""
SLICE_S = LapsConfig().slice_ms / 1e3


def spread(jobs: Sequence[Job], parts: int, each: int) -> list[list[Job]]:
    """Return ``parts`` stretches of at most ``each`` consecutive jobs, spread evenly; a single one if jobs are few."""
    each = min(each, len(jobs) // parts)
    if each < 2:
        return [list(jobs)]
    step = (len(jobs) - each) / max(1, parts - 1)
    return [chain_conversations(jobs[round(i * step) :][:each]) for i in range(parts)]


@dataclass
class Trials:
    """Simulations of setups. Results on the whole traffic and on stretches are kept."""

    question: Question
    traffic: Traffic
    tell: Callable[[int], None] = lambda n: None
    """Callback after each simulation that receives its number of requests."""
    capacity: float = 0.0
    """Maximum requests per second of one server."""
    request_s: float = field(init=False)
    """Approximate time to simulate a request of the traffic (seconds)."""
    _known: dict[str, list[Figures]] = field(default_factory=dict)
    _wholes: dict[str, Sample] = field(default_factory=dict)

    def __post_init__(self) -> None:
        profile = self.question.profile
        long = [job for job in self.traffic.jobs if job.kind == LONG]
        new, cached = np.array([j.new for j in long]), np.array([j.cached for j in long])
        slices = float(np.sum(lone_s(profile, new, cached, None))) / SLICE_S
        self.request_s = REQUEST_S + ROUND_S * slices / len(self.traffic.jobs)
        if self._affordable(WHOLE_S) < LEAST:
            most = max(job.new for job in self.traffic.jobs)
            raise ValueError(f"prompts of up to {most:,} tokens take too long to simulate on {profile.name}")
        self.traffic = self.traffic.cut(self._affordable(WHOLE_S), newest=False)
        # If all requests arrive at once, stock fcfs runs only full chunks: no other order does more.
        waiting = [job for part in spread(self.traffic.jobs, STRETCHES, STRETCH) for job in part]
        jobs = [replace(job, at_s=0.0, after=None, continues_stream=False) for job in waiting]
        outcome = run("fcfs", Trace(jobs), profile, chunk=self.question.chunk, overlap=_overlaps(profile))
        self.capacity = len(jobs) / outcome.seconds

    @property
    def load(self) -> float:
        """Return the offered work divided by the capacity of the servers."""
        return self.traffic.rate / (self.capacity * self.question.servers)

    def _affordable(self, seconds: float) -> int:
        return int(seconds / self.request_s)

    @property
    def parts(self) -> list[list[Job]]:
        """Return the stretches on which flags are tried."""
        return self._spread(STRETCHES, STRETCH, self.question.servers)

    def loaded(self, servers: int) -> list[list[Job]]:
        """Return the stretches on which loads and numbers of servers are tried."""
        return self._spread(LOADED, LOADED_STRETCH, servers)

    def _spread(self, parts: int, each: int, servers: int) -> list[list[Job]]:
        fewest = max(FEW, min(FEWEST, self._affordable(SLOW_S) // parts))
        each = max(fewest, min(max(each, PER_SERVER * servers), self._affordable(SEARCH_S) // parts))
        return spread(self.traffic.jobs, parts, each)

    def whole(self, setup: Setup) -> Sample:
        key = repr(replace(setup, label=""))
        if key not in self._wholes:
            self._wholes[key] = self._run(setup, self.traffic.jobs, self.question)
        return self._wholes[key]

    def change(self, these: Setup, those: Setup) -> Change:
        """Return the ratios of ``these`` to ``those`` on the whole traffic, from its parts."""
        both = ([Figures.of(part, self.question) for part in self.whole(s).parts(PARTS)] for s in (these, those))
        return Change.of(*both)

    def stretches(self, setup: Setup, profile: Profile | None = None) -> list[Figures]:
        """Return the figures of each stretch. ``profile``: profile instead of the question's."""
        key = repr((replace(setup, label=""), profile))
        if key not in self._known:
            parts = self.parts
            asked = replace(self.question, profile=profile or self.question.profile)
            played = [self._run(setup, part, asked) for part in parts]
            self._known[key] = [Figures.of(s.since(warm_s(part)), asked) for s, part in zip(played, parts, strict=True)]
        return self._known[key]

    def in_time(self, setup: Setup, load: float, servers: int) -> float:
        """Return the share of requests in time (0..1) of the worse class, at another load and number of servers."""
        asked = replace(self.question, servers=servers)
        stretch = self.traffic.rate / (load * self.capacity * servers)
        due: Counter[str] = Counter()
        met: Counter[str] = Counter()
        for part in self.loaded(servers):
            jobs = stretched(part, stretch)
            # A request not served by then is late anyway. But sessions send requests later if servers are slow.
            ends = all(job.after is None for job in jobs)
            until_s = jobs[-1].at_s + max(asked.short_s, asked.long_s) if ends else math.inf
            sample = self._run(setup, jobs, asked, until_s).since(warm_s(jobs))
            short = sample.new <= THRESHOLD
            came = {SHORT: int(short.sum()), LONG: int((~short).sum())}
            due.update((job.kind for job in jobs if job.at_s >= warm_s(jobs)) if ends else came)
            met[SHORT] += int((sample.ttft[short] <= asked.short_s).sum())
            met[LONG] += int((sample.ttft[~short] <= asked.long_s).sum())
        return min(met[kind] / n for kind, n in due.items())

    def _run(self, setup: Setup, jobs: Sequence[Job], asked: Question, until_s: float = math.inf) -> Sample:
        outcome = run(
            setup.policy,
            Trace(jobs),
            asked.profile,
            servers=asked.servers,
            router="pools" if setup.pools else "least-load",
            chunk=setup.chunk,
            knobs=setup.knobs,
            until_s=until_s,
            overlap=_overlaps(asked.profile),
        )
        self.tell(len(jobs))
        return Sample.of(outcome)


def _overlaps(profile: Profile) -> bool:
    """Return True if servers of this profile run the overlap loop: not if the host computes or ranks step together."""
    return profile.ahead and profile.group is None
