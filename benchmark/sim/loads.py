"""Loads that ``rules`` runs: open ones at a share of what stock serves, clients in closed loops, and deadlines."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal, NamedTuple

from laps_plan.profile import Profile
from laps_plan.sim.metrics import lone_s
from laps_plan.sim.variants import VARIANTS, run
from laps_plan.traffic import named
from laps_plan.traffic.job import LONG, Job
from laps_plan.traffic.lengths import Sizes, lmsys, log_uniform, mix
from laps_plan.traffic.streams import TURNAROUND_S, Closed, Open, Stream, Trace

from benchmark.sim import groups

CHUNK = 8192
SCALE = named.Scale(65_536, 4 * CHUNK)
WHALE = named.Scale(16_384, 16_384)
SHORT = lmsys(256)
MIX = mix(SHORT, log_uniform(1024, 8192), 0.05)
DEADLINE = 3.0
"""Over the time that a request takes alone."""
FAR_S, NEAR_S, LATER_S = TURNAROUND_S, (0.1e-3, 0.3e-3), 20e-3
"""How soon clients send again: uniform between two; mean, exponential (seconds)."""
NEAR_REPLY_S, NEAR_FRONT_S = 0.5e-3, 0.2e-3
"""Time of an answer and of a request between a near client and the scheduler (seconds)."""
BURST, BURST_RATE = 6.0, 0.5
"""Mean requests of a burst, and how much of a device they would keep busy one by one (0..1)."""

TIGHT = 80_000, 1.0
"""KV tokens of a server whose memory runs out, and seconds until a decode server has fetched a prompt's."""
GROUP_LOAD = 0.7
"""Load of ranks that plan together, as a share of what stock serves (0..1)."""
SERVERS = 4
"""Prefill servers behind a router."""
SAMPLE = 600
"""Requests from which an open load's capacity is measured."""
LONGEST_S = 150.0
"""Longest simulated time of an open load (seconds)."""
LEAST_LONG = 8
"""Least number of long requests in an open load, if ``LONGEST_S`` allows."""


class Pause(NamedTuple):
    """Pause of a client, from an answer to its next request (seconds)."""

    low_s: float
    high_s: float
    later: float = 0.0
    """Share of pauses that are LATER_S on average (0..1)."""

    @property
    def mean_s(self) -> float:
        """Mean."""
        return (1.0 - self.later) * (self.low_s + self.high_s) / 2 + self.later * LATER_S

    def drawn(self, u: float) -> float:
        """From a uniform number (0..1)."""
        if u < self.later:
            return -LATER_S * math.log1p(-u / self.later)
        return self.low_s + (self.high_s - self.low_s) * (u - self.later) / (1.0 - self.later)


FAR, NEAR, UNEVEN = Pause(*FAR_S), Pause(*NEAR_S), Pause(*NEAR_S, later=0.5)


@dataclass
class Loop(Closed):
    """A closed loop whose clients come back after pauses of their own."""

    pause: Pause = FAR

    def _next(self, now: float, client: int) -> Job:
        job = super()._next(now, client)
        low, high = TURNAROUND_S
        u = min(max((job.at_s - now - low) / (high - low), 0.0), 1.0 - 1e-9)
        return replace(job, at_s=now + self.pause.drawn(u))


Make = Callable[[Profile, int, int], Stream]
"""(profile, requests, seed) -> a new stream."""


Kind = Literal["policy", "memory", "group", "router"]
"""Rules that a load is for: of one server, of one whose memory runs out, of ranks that plan together, of a router."""


@dataclass(frozen=True)
class Load:
    """One load. `requests`: of one simulation, at least."""

    make: Make
    requests: int = 1000
    clients: int = 0
    """Clients of a closed loop; 0: it is an open load."""
    pause: Pause = FAR
    """Pause of its clients."""
    near: bool = False
    """Clients have their answers, and the scheduler its requests, almost at once."""
    deadlines: bool = False
    """Each request has one: DEADLINE times what it takes alone."""
    kind: Kind = "policy"
    servers: int = 1
    memory: tuple[int, float] | None = None
    """KV tokens, and seconds until those of a prompt are fetched; None = without limit."""

    def profile(self, one: Profile) -> Profile:
        """The profile as these clients see it."""
        return replace(one, reply_s=NEAR_REPLY_S, front_s=NEAR_FRONT_S) if self.near else one


def arrivals(workload: named.Workload, share: float, profile: Profile, requests: int, seed: int) -> list[Job]:
    """Jobs at a share of stock fcfs's capacity, which is that of the workload's sample with all of it waiting."""
    sample = workload.sample(SAMPLE, random.Random(f"{seed} sample"))
    waiting = Trace([replace(job, at_s=0.0, after=None) for job in sample])
    capacity = run(VARIANTS["fcfs"], waiting, profile, chunk=CHUNK).rate
    span_s = min(LONGEST_S, requests / (share * capacity))
    offer = named.Offer(share, span_s, capacity, lambda new: float(lone_s(profile, [new], [0], CHUNK)[0]))
    rows = workload.arrivals(offer, random.Random(seed))
    long = sum(job.kind == LONG for job in rows)
    if long >= LEAST_LONG or span_s >= LONGEST_S:
        return rows
    longer = replace(offer, span_s=min(LONGEST_S, span_s * LEAST_LONG / max(1, long)))
    return workload.arrivals(longer, random.Random(seed))


def _open(workload: named.Workload, share: float) -> Make:
    @cache
    def rows(name: str, requests: int, seed: int) -> list[Job]:
        return arrivals(workload, share, Profile.load(name), requests, seed)

    return lambda profile, requests, seed: Trace(rows(profile.name, requests, seed))


def _drawn(share: float, sizes: Sizes = MIX) -> Make:
    return _open(named.Drawn("mix", "", sizes), share)


def _named(name: str, share: float, scale: named.Scale = SCALE) -> Make:
    return _open(named.make(name, scale), share)


def _due(make: Make) -> Make:
    def with_deadlines(profile: Profile, requests: int, seed: int) -> Stream:
        jobs = list(make(profile, requests, seed).arrivals())
        alone_s = lone_s(profile, [job.new for job in jobs], [job.cached for job in jobs], CHUNK)
        return Trace([replace(job, slo_s=DEADLINE * float(s)) for job, s in zip(jobs, alone_s, strict=True)])

    return with_deadlines


def _closed(sizes: Sizes, clients: int, requests: int = 1000, pause: Pause = FAR) -> Load:
    def make(profile: Profile, requests: int, seed: int) -> Stream:
        return Loop(sizes, clients, requests, seed, pause=pause)

    return Load(make, requests, clients, pause, near=pause is not FAR)


def _group(name: str) -> Load:
    def make(profile: Profile, requests: int, seed: int) -> Stream:
        return groups.load(name, GROUP_LOAD * groups.CAPACITY[name], seed)

    return Load(make, kind="group")


def _fleet(make: Callable[[float], Make], share: float, requests: int) -> Load:
    return Load(make(SERVERS * share), requests, kind="router", servers=SERVERS)


def _bursts(profile: Profile, requests: int, seed: int) -> Stream:
    step_s = profile.coefficients.step_s + profile.step_host_s
    return Open(SHORT, BURST_RATE / step_s, requests, seed, burst=BURST)


LOADS: dict[str, Load] = {
    "mix 50%": Load(_drawn(0.5)),
    "mix 70%": Load(_drawn(0.7)),
    "mix 90%": Load(_drawn(0.9), 2000),
    "lmsys 80%": Load(_drawn(0.8, lmsys(SCALE.longest)), 2000),
    "azure 80%": Load(_named("azure", 0.8), 500),
    "mooncake 60%": Load(_named("mooncake", 0.6), 200),
    "agents 80%": Load(_named("agents", 0.8), 300),
    "whales 80%": Load(_named("whale", 0.8, WHALE), 1500),
    "overload 120%": Load(_drawn(1.2), 1500),
    "closed 8": _closed(MIX, 8),
    "closed 32": _closed(MIX, 32, 2000),
    "chat 8": _closed(SHORT, 8),
    "chat 2, near": _closed(SHORT, 2, pause=NEAR),
    "chat 8, near": _closed(SHORT, 8, pause=NEAR),
    "chat 8, uneven": _closed(SHORT, 8, pause=UNEVEN),
    "bursts, near": Load(_bursts, near=True),
    "mix 90%, deadlines": Load(_due(_drawn(0.9)), deadlines=True),
    "mooncake 60%, tight": Load(_named("mooncake", 0.6), 200, kind="memory", memory=TIGHT),
    "mix 70%, tight": Load(_drawn(0.7), 1500, kind="memory", memory=(TIGHT[0] // 4, TIGHT[1])),
    **{f"{name}, ranks": _group(name) for name in ("agents", "mooncake_synthetic", "azure_conv")},
    "mix 70%, fleet": _fleet(_drawn, 0.7, 6000),
    "azure 70%, fleet": _fleet(lambda share: _named("azure", share), 0.7, 3000),
    "agents 70%, fleet": _fleet(lambda share: _named("agents", share), 0.7, 1500),
    "turns 70%, fleet": _fleet(lambda share: _named("turns", share), 0.7, 3000),
}
