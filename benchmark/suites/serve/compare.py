"""One open load on every variant, in turns, with the same seeded arrivals: what was seen, and its figures."""

from __future__ import annotations

import asyncio
import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from benchmark.load import client
from benchmark.load.client import Answer
from benchmark.load.connection import Target
from benchmark.load.prompts import Prompts
from benchmark.results.metrics import Slo, figures
from benchmark.results.rounds import Ratio, in_turns, ratio
from benchmark.rig.fleet import busy_s, flush
from benchmark.suites.serve import calibrate
from benchmark.workloads.job import Job
from benchmark.workloads.named import Offer, Workload

PATIENCE_S = 60.0
GOAL = 0.9
"""Share of each class that must be within its SLO for a rate to count as kept."""


class Servers(Protocol):
    """Where variants are served."""

    def target(self, name: str, /) -> Target:
        """Where its load goes."""

    def prefill(self, name: str, /) -> Target:
        """Its prefill server."""


@dataclass
class Settings:
    """Of a comparison."""

    rounds: int
    span_s: float
    utilisation: float
    seed: int
    slo_factor: float
    longest: int
    calibrate_s: float = 5.0


@dataclass
class Measured:
    """The machine, as stock fcfs uses it."""

    lone: calibrate.Lone
    capacity_per_s: float
    on: str
    """The variant it was measured on."""

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        ladder = {str(n): s for n, s in zip(self.lone.tokens, self.lone.seconds, strict=True)}
        return {"lone_ttft_s": ladder, "capacity_per_s": self.capacity_per_s}


def measure(servers: Servers, base: str, workload: Workload, prompts: Prompts, settings: Settings) -> Measured:
    """Lone TTFT and capacity on the variant ``base``. Raises ConnectionError."""
    target = servers.target(base)
    lone = calibrate.lone(target, prompts, settings.longest)
    return Measured(lone, calibrate.capacity(target, workload, prompts, settings.calibrate_s, settings.seed), base)


def arrivals(workload: Workload, measured: Measured, settings: Settings, seed: int) -> list[Job]:
    """The jobs of a round: the same for every variant."""
    offer = Offer(settings.utilisation, settings.span_s, measured.capacity_per_s, measured.lone)
    return workload.arrivals(offer, random.Random(seed))


@dataclass
class Compared:
    """What was seen, by variant and round."""

    measured: Measured
    slo: Slo
    answers: dict[str, list[list[Answer]]]
    busy: dict[str, list[float]] = field(default_factory=dict)
    """Of LAPS variants: share of a round in which the device was busy, as the server says."""
    goodput_per_s: dict[str, float] = field(default_factory=dict)
    """Highest rate (requests/s) that kept GOAL of each class within its SLO."""

    def per_round(self, name: str) -> list[dict[str, Any]]:
        """Figures of each round."""
        return [figures(a, self.slo) for a in self.answers[name]]

    def pooled(self, name: str) -> dict[str, Any]:
        """Quantiles over the requests of all rounds; rates and shares are medians over rounds."""
        rounds = self.per_round(name)
        whole = figures([a for r in self.answers[name] for a in r], self.slo)
        return whole | {key: statistics.median(r[key] for r in rounds) for key in ("requests_per_s", "tokens_per_s")}

    def values(self, name: str, *path: str) -> list[float]:
        """One figure, round by round, as ``("short", "p90_ms")``."""
        out = []
        for figure in self.per_round(name):
            for key in path:
                figure = figure[key]
            out.append(float(figure))  # type: ignore[arg-type]
        return out

    def ratio(self, new: str, base: str, *path: str) -> Ratio | None:
        """One figure of a variant over another's; None where a round lacks it."""
        a, b = self.values(new, *path), self.values(base, *path)
        if any(math.isnan(v) for v in (*a, *b)):
            return None
        return ratio(a, b)


def load(servers: Servers, name: str, jobs: Sequence[Job], prompts: Prompts, seed: int) -> list[Answer]:
    """One round on one variant, from an empty prefix cache but for histories older than the round."""
    target = servers.target(name)
    bodies = prompts.bodies(jobs, seed)
    if prompts.reuse:
        flush(servers.prefill(name))
        older: dict[int, int] = {}
        for job in jobs:
            if not job.goes_on:
                older[job.stream] = max(older.get(job.stream, 0), job.cached)
        warm = [prompts.whole_stream(stream, tokens) for stream, tokens in older.items() if tokens]
        asyncio.run(client.one_by_one(target, warm))
    return asyncio.run(client.replay(target, jobs, bodies, PATIENCE_S))


def run(
    servers: Servers,
    names: Sequence[str],
    workload: Workload,
    measured: Measured,
    prompts: Prompts,
    settings: Settings,
    say: Callable[[str], None],
) -> Compared:
    """All rounds, interleaved. Raises ConnectionError where a variant answers nothing."""

    def once(i: int, name: str) -> tuple[list[Answer], float | None]:
        seed = settings.seed * 1000 + i
        servers.target(name)
        before = busy_s(servers.prefill(name))
        answers = load(servers, name, arrivals(workload, measured, settings, seed), prompts, seed)
        after = busy_s(servers.prefill(name))
        if answers and all(a.ttft_s is None for a in answers):
            raise ConnectionError(f"{name} answered none of {len(answers)} requests of {workload.name}")
        if before is None or after is None:
            return answers, None
        took = max((a.sent_s + a.ttft_s for a in answers if a.ttft_s is not None), default=settings.span_s)
        return answers, (after - before) / took

    seen = in_turns(names, settings.rounds, once, say, f"{workload.name}: ")
    answers = {name: [a for a, _ in rounds] for name, rounds in seen.items()}
    busy = {name: [b for _, b in rounds if b is not None] for name, rounds in seen.items()}
    busy = {name: shares for name, shares in busy.items() if shares}
    return Compared(measured, Slo(settings.slo_factor, measured.lone), answers, busy)


def goodput(
    servers: Servers,
    names: Sequence[str],
    workload: Workload,
    measured: Measured,
    prompts: Prompts,
    settings: Settings,
    say: Callable[[str], None],
    steps: int = 5,
) -> dict[str, float]:
    """Highest rate (requests/s) with GOAL of each class within its SLO, by halving between 0 and 1.6 of capacity.

    0 where not even the lowest rate tried keeps it. Every variant meets the same arrivals at the same rate.
    """
    slo = Slo(settings.slo_factor, measured.lone)
    found = {}
    for name in names:
        low, high, rate = 0.0, 1.6, 0.0
        for step in range(steps):
            middle = (low + high) / 2
            say(f"{workload.name}: goodput of {name}, {middle:.2f} of capacity")
            offered = Settings(**{**vars(settings), "utilisation": middle})
            jobs = arrivals(workload, measured, offered, settings.seed * 1000 + 500 + step)
            figure = figures(load(servers, name, jobs, prompts, settings.seed + step), slo)
            shares = [figure[kind]["goodput"] for kind in ("short", "long")]
            if all(math.isnan(s) or s >= GOAL for s in shares):
                low, rate = middle, len(jobs) / settings.span_s
            else:
                high = middle
        found[name] = rate
    return found
