"""Loads of the simulated studies: open loads at a share of stock's capacity, closed loops, and deadlines."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal, NamedTuple

from laps_plan.profile import Profile
from laps_plan.sim.metrics import lone_s
from laps_plan.sim.variants import run
from laps_plan.traffic import named, tasks, traces, turns
from laps_plan.traffic.job import LONG, Job
from laps_plan.traffic.lengths import Sizes, lmsys, log_uniform, mix
from laps_plan.traffic.streams import TURNAROUND_S, Closed, Open, Stream, Trace

CHUNK = 8192
SCALE = named.Scale(65_536, 4 * CHUNK)
WHALE = named.Scale(16_384, 16_384)
SHORT = lmsys(256)
MIX = mix(SHORT, log_uniform(1024, 8192), 0.05)
DEADLINE = 3.0
"""Deadline of a request, over its lone TTFT."""
FAR_S, NEAR_S, LATER_S = TURNAROUND_S, (0.1e-3, 0.3e-3), 20e-3
"""Pauses of clients (seconds): two uniform between bounds (FAR_S, NEAR_S), one exponential with mean LATER_S."""
NEAR_REPLY_S, NEAR_FRONT_S = 0.5e-3, 0.2e-3
"""Time of an answer and of a request between the scheduler and a near client (seconds)."""
BURST, CROWD, BURST_RATE = 6.0, 100.0, 0.5
"""Mean number of requests in a burst and in a crowd, and the share of a device that they would keep busy one by one
(0..1)."""
TIGHT = 80_000, 1.0
"""KV tokens of a server whose memory runs out, and seconds until a decode server has fetched a prompt's KV."""
RANKS_PER_S = {"azure_conv": 30.8, "mooncake_synthetic": 2.38, "agents": 1.33}
"""Requests/s of eight DeepSeek-V3 ranks that plan together: 70% of what fcfs with its best chunk serves."""
RANKS_LONGEST, THINK_S, TOKEN_S, TURNS = 131_072, 30.0, 0.02, 11
"""Loads of ranks: longest prompt (tokens); longest pause of agents, and time per output token (seconds); number of
turns of a session that are replayed, around a random turn."""
TASKS = "tasks"
"""FlowPrefill's tasks."""
AGENTS_S = 2400.0
"""Duration of a simulation of agents on ranks (seconds). In other loads of ranks, a seed has a third of the trace."""
SERVERS = 4
"""Prefill servers behind a router."""
SAMPLE = 600
"""Requests from which an open load's capacity is measured."""
LONGEST_S = 150.0
"""Longest simulated time of an open load (seconds)."""
LEAST_LONG = 8
"""Least number of long requests in an open load, if ``LONGEST_S`` allows."""
Kind = Literal["policy", "memory", "group", "router", "divided"]
"""Rules that a load tests: of one server, of a server whose memory runs out, of ranks that plan together, of a router,
or of a router with two pools from the start."""


class Pause(NamedTuple):
    """Pause of a client, from an answer to its next request (seconds)."""

    low_s: float
    high_s: float
    later: float = 0.0
    """Share of pauses that are exponential with mean LATER_S (0..1)."""

    @property
    def mean_s(self) -> float:
        return (1.0 - self.later) * (self.low_s + self.high_s) / 2 + self.later * LATER_S

    def drawn(self, u: float) -> float:
        """Return the pause (seconds) for a uniform random number ``u`` (0..1)."""
        if u < self.later:
            return -LATER_S * math.log1p(-u / self.later)
        return self.low_s + (self.high_s - self.low_s) * (u - self.later) / (1.0 - self.later)


FAR, NEAR, UNEVEN = Pause(*FAR_S), Pause(*NEAR_S), Pause(*NEAR_S, later=0.5)


@dataclass
class Loop(Closed):
    """Closed loop whose clients make pauses of type ``pause``."""

    pause: Pause = FAR

    def _next(self, now: float, client: int) -> Job:
        job = super()._next(now, client)
        low, high = TURNAROUND_S
        u = min(max((job.at_s - now - low) / (high - low), 0.0), 1.0 - 1e-9)
        return replace(job, at_s=now + self.pause.drawn(u))


def capacity(sample: Sequence[Job], profile: Profile, chunk: int = CHUNK) -> float:
    """Return the requests/s of stock fcfs with all of the sample waiting."""
    waiting = Trace([replace(job, at_s=0.0, after=None, slo_s=None) for job in sample])
    return run("fcfs", waiting, profile, chunk=chunk).rate


def offer(
    workload: named.Workload,
    share: float,
    profile: Profile,
    seed: int,
    *,
    requests: int = 0,
    span_s: float = math.inf,
    chunk: int = CHUNK,
) -> named.Offer:
    """Return a load at a share of stock fcfs's capacity, simulated with a sample of the workload that waits as a whole.

    The load lasts for ``requests`` requests, at most ``span_s`` seconds.
    """
    rate = capacity(workload.sample(SAMPLE, random.Random(f"{seed} sample")), profile, chunk)
    span_s = min(span_s, requests / (share * rate) if requests else math.inf)
    return named.Offer(share, span_s, rate, lambda new: float(lone_s(profile, [new], [0], chunk)[0]))


@dataclass(frozen=True, eq=False)
class Load:
    """One load: an open one, a closed loop, TASKS, or one of RANKS_PER_S."""

    what: named.Workload | Sizes | str
    """Workload of an open load, lengths of a closed loop or of bursts, TASKS, name in RANKS_PER_S."""
    share: float = 0.0
    """Offered work per server, over stock's capacity on one server."""
    requests: int = 1000
    """Requests of one simulation, before LONGEST_S and LEAST_LONG apply."""
    clients: int = 0
    """Clients of a closed loop; 0 for an open load."""
    pause: Pause = FAR
    burst: float = BURST
    """Mean number of requests in a burst."""
    near: bool = False
    """True if answers reach the clients, and requests the scheduler, almost at once."""
    deadlines: bool = False
    """True if each request has a deadline: that of its task, or DEADLINE times its lone TTFT."""
    kind: Kind = "policy"
    servers: int = 1
    memory: tuple[int, float] | None = None
    """KV tokens, and seconds until the KV of a prompt is fetched; None for unlimited memory."""

    def profile(self, one: Profile) -> Profile:
        """Return the profile; for near clients, with the reply and front times of near clients."""
        return replace(one, reply_s=NEAR_REPLY_S, front_s=NEAR_FRONT_S) if self.near else one

    def stream(self, profile: Profile, requests: int, seed: int) -> Stream:
        """Return a new stream of about ``requests`` requests; loads of ranks have a length of their own."""
        if self.what == TASKS:
            return Trace(_of_tasks(self.share, profile.name, requests, seed))
        if isinstance(self.what, str):
            return Trace(_of_ranks(self.what, seed))
        if isinstance(self.what, named.Workload):
            return Trace(_arrivals(self, profile.name, requests, seed))
        if self.clients:
            return Loop(self.what, self.clients, requests, seed, pause=self.pause)
        step_s = profile.coefficients.step_s + profile.step_host_s
        return Open(self.what, BURST_RATE / step_s, requests, seed, burst=self.burst)


@cache
def _arrivals(load: Load, name: str, requests: int, seed: int) -> Sequence[Job]:
    """Return the jobs of an open load, which lasts longer if there are too few long prompts."""
    assert isinstance(load.what, named.Workload)
    profile, share = Profile.load(name), load.servers * load.share
    offered = offer(load.what, share, profile, seed, requests=requests, span_s=LONGEST_S)
    jobs = load.what.arrivals(offered, random.Random(seed))
    long = sum(job.kind == LONG for job in jobs)
    if long < LEAST_LONG and offered.span_s < LONGEST_S:
        longer = min(LONGEST_S, offered.span_s * LEAST_LONG / max(1, long))
        jobs = load.what.arrivals(replace(offered, span_s=longer), random.Random(seed))
    if load.deadlines:
        alone_s = lone_s(profile, [job.new for job in jobs], [job.cached for job in jobs], CHUNK)
        jobs = [replace(job, slo_s=DEADLINE * float(s)) for job, s in zip(jobs, alone_s, strict=True)]
    return jobs


@cache
def _of_tasks(share: float, name: str, requests: int, seed: int) -> Sequence[Job]:
    """Return FlowPrefill's tasks at a share of stock fcfs's capacity."""
    model = "32b" if "32b" in name else "8b"
    rate = capacity(tasks.jobs(100.0, SAMPLE, model, seed), Profile.load(name))
    return tasks.jobs(share * rate, requests, model, seed)


def _of_ranks(name: str, seed: int) -> Sequence[Job]:
    """Return the jobs of a load for ranks that plan together."""
    rate = RANKS_PER_S[name]
    if name == "agents":
        sessions = turns.agents(RANKS_LONGEST, THINK_S, TOKEN_S)
        return turns.jobs(turns.stretches(sessions, TURNS, rate, AGENTS_S, random.Random(f"{name}/{seed}")))
    rows = traces.read(name)
    third = len(rows) // 3
    part = rows[seed % 3 * third :][:third]
    stretch = third / rate / (part[-1].at_s - part[0].at_s)
    cut = [(row.at_s, min(RANKS_LONGEST, row.new), row.cached) for row in part]
    return [Job((at - part[0].at_s) * stretch, new, min(RANKS_LONGEST - new, old)) for at, new, old in cut]


def _closed(sizes: Sizes, clients: int, requests: int = 1000, pause: Pause = FAR) -> Load:
    return Load(sizes, 0.0, requests, clients, pause, near=pause is not FAR)


def _fleet(workload: named.Workload, requests: int, kind: Kind = "router") -> Load:
    return Load(workload, 0.7, requests, kind=kind, servers=SERVERS)


MIXED, MOONCAKE = named.Drawn("mix", "", MIX), named.make("mooncake", SCALE)
AZURE, AGENTS = named.make("azure", SCALE), named.make("agents", SCALE)
LOADS: dict[str, Load] = {
    "mix 50%": Load(MIXED, 0.5),
    "mix 70%": Load(MIXED, 0.7),
    "mix 90%": Load(MIXED, 0.9, 2000),
    "lmsys 80%": Load(named.Drawn("mix", "", lmsys(SCALE.longest)), 0.8, 2000),
    "azure 80%": Load(AZURE, 0.8, 500),
    "mooncake 60%": Load(MOONCAKE, 0.6, 200),
    "agents 80%": Load(AGENTS, 0.8, 300),
    "whales 80%": Load(named.make("whale", WHALE), 0.8, 1500),
    "overload 120%": Load(MIXED, 1.2, 1500),
    "closed 8": _closed(MIX, 8, 4000),
    "closed 32": _closed(MIX, 32, 12_000),
    "chat 8": _closed(SHORT, 8),
    "chat 2, near": _closed(SHORT, 2, pause=NEAR),
    "chat 8, near": _closed(SHORT, 8, pause=NEAR),
    "chat 8, uneven": _closed(SHORT, 8, pause=UNEVEN),
    "bursts, near": Load(SHORT, near=True),
    "crowds, near": Load(SHORT, burst=CROWD, near=True),
    "mix 90%, deadlines": Load(MIXED, 0.9, deadlines=True),
    "tasks 100%, deadlines": Load(TASKS, 1.0, 1500, deadlines=True),
    "tasks 130%, deadlines": Load(TASKS, 1.3, 1500, deadlines=True),
    "mooncake 60%, tight": Load(MOONCAKE, 0.6, 200, kind="memory", memory=TIGHT),
    "mix 70%, tight": Load(MIXED, 0.7, 1500, kind="memory", memory=(TIGHT[0] // 4, TIGHT[1])),
    **{f"{name}, ranks": Load(name, kind="group") for name in RANKS_PER_S},
    "mix 70%, fleet": _fleet(MIXED, 6000),
    "azure 70%, fleet": _fleet(AZURE, 3000),
    "agents 70%, fleet": _fleet(AGENTS, 1500),
    "turns 70%, fleet": _fleet(named.make("turns", SCALE), 3000),
    "mix 70%, divided": _fleet(MIXED, 6000, "divided"),
    "azure 70%, divided": _fleet(AZURE, 3000, "divided"),
}
