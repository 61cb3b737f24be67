"""Comparison of variants under one load, in turns, with the same seeded arrivals.

Stock fcfs is measured first, in the same run: lone TTFT, and capacity in a closed loop of the load's lengths.
"""

from __future__ import annotations

import asyncio
import math
import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from laps_plan.profile import Profile
from laps_plan.traffic.job import Job
from laps_plan.traffic.little import Steady
from laps_plan.traffic.named import Offer, Workload

from benchmark.load import Answer, Loop, Prompts, Target, client
from benchmark.results import Comparison, Slo, quantile, take_turns
from benchmark.results.metrics import figures
from benchmark.rig import Device, Fleet, busy_s, flush
from benchmark.sim.loads import offer

PATIENCE_S = 60.0
CLIENTS = 32
LONGER = (1, 2, 4)
"""Factors on the duration of a closed loop, for successive attempts."""
LADDER = (16, 64, 128, 256, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
SAMPLE = 600
BLOCK, BLOCKS = 100, 10
"""Requests of a block in a closed loop, and number of blocks."""
SLO_FACTOR = 10.0
"""A request is in time if its TTFT is at most this many lone TTFTs."""
SIMULATED = "fcfs, simulated,"

Points = dict[int, Comparison]
"""Closed loops: clients -> figures of each variant and round."""


@dataclass
class Settings:
    """Settings of a comparison."""

    rounds: int
    span_s: float
    utilisation: float
    seed: int
    longest: int
    calibrate_s: float = 5.0
    capacity_per_s: float | None = None
    """Given capacity (requests/s); None: measured or simulated."""


@dataclass(frozen=True)
class Lone:
    """TTFT of a lone request, by its new tokens."""

    tokens: tuple[int, ...]
    seconds: tuple[float, ...]

    def __call__(self, new: int) -> float:
        """Return seconds; interpolated between measured lengths, beyond the last one in proportion."""
        return float(np.interp(new, self.tokens, self.seconds)) * max(1.0, new / self.tokens[-1])


def lengths(longest: int) -> tuple[int, ...]:
    """Return the prompt lengths (tokens) at which the lone TTFT is measured or simulated."""
    return tuple(sorted({n for n in LADDER if n < longest} | {longest}))


def lone_ttft(target: Target, prompts: Prompts, longest: int) -> Lone:
    """Measure the median lone TTFT of each length. Raises ConnectionError."""
    tokens, seconds = lengths(longest), list[float]()
    for n in reversed(tokens):
        # The first request is not counted. Long prompts vary less, so they are repeated less often.
        bodies = prompts.bodies([Job(0.0, n)] * (1 + (5 if n > 1024 else 15)), seed=n)
        took = statistics.median(asyncio.run(client.one_by_one(target, bodies))[1:])
        # A disturbed measurement must not make a shorter prompt look slower than a longer one.
        seconds.append(min([took, *seconds]))
    return Lone(tokens, tuple(reversed(seconds)))


def in_blocks(workload: Workload, rng: random.Random) -> list[Job]:
    """Return jobs in blocks of the same lengths in different orders, so that any part of a loop has the wanted mix."""
    block = workload.sample(BLOCK, rng)
    return [job for _ in range(BLOCKS) for job in rng.sample(block, BLOCK)]


def answered_loop(
    target: Target, bodies: Iterable[bytes], clients: int, seconds: float, run_in_s: float, tokens: Sequence[int] = (0,)
) -> Loop:
    """Run a closed loop (``client.closed``). Raises ConnectionError if a request fails."""
    loop = asyncio.run(client.closed(target, bodies, clients, seconds, run_in_s, tokens))
    if loop.failed:
        raise ConnectionError(f"{loop.failed} requests to {target.url} failed in a loop of {clients} clients")
    return loop


def closed_loop(target: Target, bodies: Sequence[bytes], clients: int, seconds: float, run_in_s: float) -> Loop:
    """Run a closed loop; repeat it for twice as long while Little's law does not hold, because a request may have
    waited during the whole loop. ``run_in_s``: uncounted time until requests are answered as fast as they arrive.
    Raises ConnectionError if a request fails, or if the law does not hold in the last loop."""
    for longer in LONGER:
        loop = answered_loop(target, bodies, clients, longer * seconds, longer * run_in_s)
        if loop.steady.holds:
            break
        # Prompts that were sent may be cached now: they come again after all other prompts.
        at = len(loop.asked) % len(bodies)
        bodies = [*bodies[at:], *bodies[:at]]
    loop.steady.require(target.url)
    return loop


def cache_histories(target: Target, prompts: Prompts, jobs: Sequence[Job]) -> None:
    """Make the server cache the histories that are older than the load."""
    asyncio.run(client.one_by_one(target, prompts.histories(jobs)))


@dataclass
class Measured:
    """Speed of the machine with stock fcfs."""

    lone: Lone
    capacity_per_s: float
    variant: str
    """Variant that gave these figures."""
    steady: Steady | None = None
    """Closed loop that gave the capacity."""

    def as_dict(self) -> dict[str, Any]:
        ladder = {str(n): s for n, s in zip(self.lone.tokens, self.lone.seconds, strict=True)}
        loop = {} if self.steady is None else {"closed_loop": asdict(self.steady)}
        return {"lone_ttft_s": ladder, "capacity_per_s": self.capacity_per_s, **loop}


def simulated(device: Device, workload: Workload, settings: Settings) -> Measured:
    """Return the speed of stock fcfs on an emulated device, simulated from the profile: measured closed loops of few
    slow requests would have to be long."""
    profile = Profile.load(device.laps["profile"])
    offered = offer(workload, settings.utilisation, profile, settings.seed, span_s=settings.span_s, chunk=device.chunk)
    tokens = lengths(settings.longest)
    lone = Lone(tokens, tuple(offered.lone_s(n) for n in tokens))
    return Measured(lone, settings.capacity_per_s or offered.capacity_per_s, SIMULATED)


@dataclass
class Compared:
    """Answers by variant and round."""

    measured: Measured
    slo: Slo
    answers: dict[str, list[list[Answer]]]
    busy: dict[str, list[float]] = field(default_factory=dict)
    """Busy share of the device in each round, reported by LAPS servers."""

    @property
    def comparison(self) -> Comparison:
        return Comparison({name: [figures(a, self.slo) for a in rounds] for name, rounds in self.answers.items()})

    def pooled(self, name: str) -> dict[str, Any]:
        """Return quantiles over the requests of all rounds; rates are medians over rounds."""
        whole, rounds = figures([a for r in self.answers[name] for a in r], self.slo), self.comparison
        return whole | {key: rounds.median(name, key) for key in ("requests_per_s", "tokens_per_s")}


@dataclass
class Bench:
    """Runs loads on the servers, in turns."""

    servers: Fleet
    names: Sequence[str]
    prompts: Prompts
    settings: Settings
    say: Callable[[str], None]

    def measure(self, base: str, workload: Workload, lone: Lone | None = None) -> Measured:
        """Measure lone TTFT, if not given, and capacity on the variant ``base``. Raises ConnectionError."""
        settings, target = self.settings, self.servers.target(base)
        self.say(f"measuring the machine with {base}")
        lone = lone or lone_ttft(target, self.prompts, settings.longest)
        if settings.capacity_per_s:
            return Measured(lone, settings.capacity_per_s, base)
        jobs = workload.sample(SAMPLE, random.Random(f"{settings.seed} sample"))
        cache_histories(target, self.prompts, jobs)
        bodies = self.prompts.bodies(jobs, settings.seed)
        measured = closed_loop(target, bodies, CLIENTS, settings.calibrate_s, 1.0).steady
        self.say(f"capacity {measured.requests_per_s:.1f} requests/s")
        return Measured(lone, measured.requests_per_s, base, measured)

    def run(self, workload: Workload, measured: Measured) -> Compared:
        """Run an open load in all rounds. Raises ConnectionError if a variant answers nothing."""
        settings, prompts, busy = self.settings, self.prompts, dict[str, list[float]]()
        offered = Offer(settings.utilisation, settings.span_s, measured.capacity_per_s, measured.lone)

        def once(i: int, name: str) -> list[Answer]:
            target, prefill, seed = self.servers.target(name), self.servers.prefill(name), settings.seed * 1000 + i
            before = busy_s(prefill)
            jobs = workload.arrivals(offered, random.Random(seed))
            bodies = prompts.bodies(jobs, seed)
            if prompts.reuse:
                # Each round starts with a prefix cache that holds only the histories older than the load.
                flush(prefill)
                cache_histories(target, prompts, jobs)
            answers = asyncio.run(client.replay(target, jobs, bodies, PATIENCE_S))
            after = busy_s(prefill)
            ended = [a.sent_s + a.ttft_s for a in answers if a.ttft_s is not None]
            if answers and not ended:
                raise ConnectionError(f"{name} answered none of {len(answers)} requests of {workload.name}")
            if before is not None and after is not None:
                busy.setdefault(name, []).append((after - before) / max(ended, default=settings.span_s))
            return answers

        answers = take_turns(self.names, settings.rounds, once, self.say, f"{workload.name}: ")
        return Compared(measured, Slo(SLO_FACTOR, measured.lone), answers, busy)

    def closed(self, workload: Workload, clients: Sequence[int]) -> Points:
        """Run closed loops with the same work for all variants and no time limit. Raises ConnectionError if a request
        fails."""
        settings, points = self.settings, Points()
        for n in clients:

            def once(i: int, name: str, n: int = n) -> dict[str, Any]:
                jobs = in_blocks(workload, random.Random(f"{settings.seed} {n} {i}"))
                bodies, new = self.prompts.bodies(jobs, settings.seed * 1000 + i), [job.new for job in jobs]
                loop = answered_loop(self.servers.target(name), bodies, n, math.inf, 0.0, new)
                ttft_ms = {f"p{q}_ms": 1e3 * quantile(loop.ttft_s, q) for q in (50, 90)}
                rate = len(loop.asked) / (loop.end_s - loop.begin_s)
                return {"requests_per_s": rate, "steady": asdict(loop.steady), **ttft_ms}

            say = f"closed loop of {n}: "
            points[n] = Comparison(take_turns(self.names, settings.rounds, once, self.say, say))
        return points
