"""Comparison of variants under one open load, in turns, with the same seeded arrivals.

Stock fcfs is measured first, in the same run: lone prefills, and the capacity in a closed loop of the mix.
"""

from __future__ import annotations

import asyncio
import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from laps_plan.traffic.job import Job
from laps_plan.traffic.little import Steady
from laps_plan.traffic.named import Offer, Workload

from benchmark.load import client
from benchmark.load.client import Answer, Loop
from benchmark.load.connection import Target
from benchmark.load.prompts import Prompts
from benchmark.results.comparison import Comparison
from benchmark.results.metrics import KINDS, Slo, figures, quantile
from benchmark.results.rounds import in_turns
from benchmark.rig.fleet import Fleet, Running, busy_s, flush

PATIENCE_S = 60.0
CLIENTS = 32
LADDER = (16, 64, 128, 256, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
SAMPLE = 600
GOAL = 0.9
"""Share of each class within its SLO from which a rate counts as sustained."""


Points = dict[int, dict[str, dict[str, Any]]]
"""clients -> variant -> figure -> one value per round."""


@dataclass
class Settings:
    """Settings of a comparison."""

    rounds: int
    span_s: float
    utilisation: float
    seed: int
    slo_factor: float
    longest: int
    calibrate_s: float = 5.0
    capacity_per_s: float | None = None
    """Capacity to take for granted (requests/s); None: measured."""


@dataclass(frozen=True)
class Lone:
    """TTFT of a request that has the server to itself, by its new tokens."""

    tokens: tuple[int, ...]
    seconds: tuple[float, ...]

    def __call__(self, new: int) -> float:
        """Return seconds; interpolated between measured lengths, beyond the last one in proportion."""
        if new > self.tokens[-1]:
            return self.seconds[-1] * new / self.tokens[-1]
        return float(np.interp(new, self.tokens, self.seconds))


def lone_ttft(target: Target, prompts: Prompts, longest: int, repeats: int = 5) -> Lone:
    """Measure the lone TTFT: medians. Raises ConnectionError."""
    tokens = tuple(sorted({n for n in LADDER if n < longest} | {longest}))
    seconds: list[float] = []
    for n in reversed(tokens):
        # The first is not counted; long ones vary less and are repeated less often.
        few = repeats if n > 1024 else 3 * repeats
        bodies = prompts.bodies([Job(0.0, n)] * (few + 1), seed=n)
        took = statistics.median(asyncio.run(client.one_by_one(target, bodies))[1:])
        # A disturbed measurement must not make a shorter prompt look slower than a longer one.
        seconds.append(min([took, *seconds]))
    return Lone(tokens, tuple(reversed(seconds)))


def capacity(target: Target, workload: Workload, prompts: Prompts, seconds: float, seed: int) -> Steady:
    """Measure the workload's sample in a closed loop of CLIENTS. Raises ConnectionError."""
    jobs = workload.sample(SAMPLE, random.Random(f"{seed} sample"))
    cache_histories(target, prompts, jobs)
    loop = asyncio.run(client.closed(target, prompts.bodies(jobs, seed), CLIENTS, seconds, run_in_s=1.0))
    if loop.failed or not loop.ttft_s:
        raise ConnectionError(f"{loop.failed} requests to {target.url} failed in a closed loop")
    return loop.steady.require(target.url)


@dataclass
class Measured:
    """Speed of the machine with stock fcfs."""

    lone: Lone
    capacity_per_s: float
    on: str
    """Variant that gave these figures."""
    steady: Steady | None = None
    """Closed loop that gave the capacity."""

    def as_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dict."""
        ladder = {str(n): s for n, s in zip(self.lone.tokens, self.lone.seconds, strict=True)}
        found = {"lone_ttft_s": ladder, "capacity_per_s": self.capacity_per_s}
        return found if self.steady is None else {**found, "closed_loop": self.steady.as_dict()}

    def arrivals(self, workload: Workload, settings: Settings, seed: int) -> list[Job]:
        """Return the jobs of a round, the same for every variant."""
        offer = Offer(settings.utilisation, settings.span_s, self.capacity_per_s, self.lone)
        return workload.arrivals(offer, random.Random(seed))


def cache_histories(target: Target, prompts: Prompts, jobs: Sequence[Job]) -> None:
    """Have the server cache what is older than the load."""
    asyncio.run(client.one_by_one(target, prompts.histories(jobs)))


@dataclass
class Compared:
    """Answers by variant and round."""

    measured: Measured
    slo: Slo
    answers: dict[str, list[list[Answer]]]
    busy: dict[str, list[float]] = field(default_factory=dict)
    """Busy share of the device in each round, reported by LAPS servers."""
    goodput_per_s: dict[str, float] = field(default_factory=dict)
    """Highest rate (requests/s) that kept GOAL of each class within its SLO."""

    def per_round(self, name: str) -> list[dict[str, Any]]:
        """Return the figures of each round."""
        return [figures(a, self.slo) for a in self.answers[name]]

    def pooled(self, name: str) -> dict[str, Any]:
        """Return quantiles over the requests of all rounds; rates are medians over rounds."""
        rounds = self.per_round(name)
        whole = figures([a for r in self.answers[name] for a in r], self.slo)
        return whole | {key: statistics.median(r[key] for r in rounds) for key in ("requests_per_s", "tokens_per_s")}

    @property
    def comparison(self) -> Comparison:
        """Return the figures of all rounds."""
        return Comparison({name: self.per_round(name) for name in self.answers})


@dataclass
class Bench:
    """Runs loads on the servers, in turns."""

    servers: Fleet | Running
    names: Sequence[str]
    """Variants to compare."""
    prompts: Prompts
    settings: Settings
    say: Callable[[str], None]

    def measure(self, base: str, workload: Workload, lone: Lone | None = None) -> Measured:
        """Measure lone TTFT, if not given, and capacity on the variant ``base``. Raises ConnectionError."""
        settings = self.settings
        self.say(f"measuring the machine with {base}")
        target = self.servers.target(base)
        lone = lone or lone_ttft(target, self.prompts, settings.longest)
        if settings.capacity_per_s:
            return Measured(lone, settings.capacity_per_s, base)
        measured = capacity(target, workload, self.prompts, settings.calibrate_s, settings.seed)
        self.say(f"capacity {measured.requests_per_s:.1f} requests/s")
        return Measured(lone, measured.requests_per_s, base, measured)

    def run(self, workload: Workload, measured: Measured) -> Compared:
        """Run an open load in all rounds. Raises ConnectionError if a variant answers nothing."""
        settings = self.settings

        def once(i: int, name: str) -> tuple[list[Answer], float | None]:
            seed = settings.seed * 1000 + i
            self.servers.target(name)
            before = busy_s(self.servers.prefill(name))
            answers = self._load(name, measured.arrivals(workload, settings, seed), seed)
            after = busy_s(self.servers.prefill(name))
            if answers and all(a.ttft_s is None for a in answers):
                raise ConnectionError(f"{name} answered none of {len(answers)} requests of {workload.name}")
            if before is None or after is None:
                return answers, None
            took = max((a.sent_s + a.ttft_s for a in answers if a.ttft_s is not None), default=settings.span_s)
            return answers, (after - before) / took

        seen = in_turns(self.names, settings.rounds, once, self.say, f"{workload.name}: ")
        answers = {name: [a for a, _ in rounds] for name, rounds in seen.items()}
        busy = {name: [b for _, b in rounds if b is not None] for name, rounds in seen.items()}
        busy = {name: shares for name, shares in busy.items() if shares}
        return Compared(measured, Slo(settings.slo_factor, measured.lone), answers, busy)

    def goodput(self, workload: Workload, measured: Measured, steps: int = 5) -> dict[str, float]:
        """Return the highest rate (requests/s) with GOAL of each class within its SLO, by bisection between 0 and 1.6
        of capacity.

        0 if even the lowest rate tried does not keep it. Every variant gets the same arrivals at the same rate.
        """
        settings = self.settings
        slo = Slo(settings.slo_factor, measured.lone)
        found = {}
        for name in self.names:
            low, high, rate = 0.0, 1.6, 0.0
            for step in range(steps):
                middle = (low + high) / 2
                self.say(f"{workload.name}: goodput of {name}, {middle:.2f} of capacity")
                offered = replace(settings, utilisation=middle)
                jobs = measured.arrivals(workload, offered, settings.seed * 1000 + 500 + step)
                figure = figures(self._load(name, jobs, settings.seed + step), slo)
                shares = [figure[kind]["goodput"] for kind in KINDS]
                if all(math.isnan(s) or s >= GOAL for s in shares):
                    low, rate = middle, len(jobs) / settings.span_s
                else:
                    high = middle
            found[name] = rate
        return found

    def closed(self, workload: Workload, clients: Sequence[int]) -> Points:
        """Run closed loops. Raises ConnectionError if a request fails."""
        settings = self.settings
        points: Points = {}
        for n in clients:

            def once(i: int, name: str, n: int = n) -> Loop:
                jobs = workload.sample(1000, random.Random(f"{settings.seed} {n} {i}"))
                bodies = self.prompts.bodies(jobs, settings.seed * 1000 + i)
                new = [job.new for job in jobs]
                loop = asyncio.run(client.closed(self.servers.target(name), bodies, n, settings.span_s, tokens=new))
                if loop.failed or not loop.ttft_s:
                    raise ConnectionError(f"{name}: {loop.failed} requests failed with {n} clients")
                loop.steady.require(name)
                return loop

            points[n] = {
                name: {
                    "requests_per_s": [loop.rate for loop in loops],
                    "steady": [loop.steady.as_dict() for loop in loops],
                    **{f"p{q}_ms": [1e3 * quantile(loop.ttft_s, q) for loop in loops] for q in (50, 90)},
                }
                for name, loops in in_turns(
                    self.names, settings.rounds, once, self.say, f"closed loop of {n}: "
                ).items()
            }
        return points

    def _load(self, name: str, jobs: Sequence[Job], seed: int) -> list[Answer]:
        """Run one round on one variant, from an empty prefix cache except for histories older than the round."""
        target, prompts = self.servers.target(name), self.prompts
        bodies = prompts.bodies(jobs, seed)
        if prompts.reuse:
            flush(self.servers.prefill(name))
            cache_histories(target, prompts, jobs)
        return asyncio.run(client.replay(target, jobs, bodies, PATIENCE_S))
