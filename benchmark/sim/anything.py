"""Random workloads: random lengths, bursts, histories and loads, simulated on random devices.

    python -m benchmark.sim.anything [--workloads 400]

LAPS with its defaults and chunks of 8,192 is compared with the best of SGLang's policies and chunks, which is chosen in
hindsight for each workload and each figure, and with the best of the policies that are proposed for SGLang. The same
workloads with random objectives: how many requests are late, if LAPS knows the objectives as deadlines. All requests
count, also the first and the last.
"""

from __future__ import annotations

import math
import os
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
from laps_plan.profile import Profile
from laps_plan.sim.metrics import lone_s
from laps_plan.sim.variants import run
from laps_plan.traffic.job import Job
from laps_plan.traffic.lengths import Sizes, log_uniform, mix
from laps_plan.traffic.streams import Trace

from benchmark.results import Command, Namespace, Parser, Piece, Table, count, quantile
from benchmark.rig import STOCK
from benchmark.sim.loads import CHUNK, capacity
from benchmark.sim.rules import PROFILES

SETTINGS = tuple(product(STOCK, (2048, CHUNK)))
PROPOSED = tuple(product(("several", "interleaved", "preflow"), (2048, CHUNK)))
LOADS = (0.4, 0.6, 0.75, 0.9)
LONGEST, REQUESTS = 100_000, (400, 800)
FIGURES = {
    "mean TTFT": "best of stock", "mean slowdown": "best of stock", "P90 of the shorter 70%": "best of stock",
    "P90 of the longest 10%": "fcfs with its better chunk", "time for all": "best of stock",
}  # fmt: skip
"""Figures of LAPS, and the stock figure that each is divided by."""
LATE: dict[str, dict[str, Any]] = {
    "order s-edf": {"knobs": {"order": "s-edf"}},
    "order lars": {"knobs": {"order": "lars"}},
    "LAPS without deadlines": {"knows": False},
}
"""Other ways of LAPS that are compared by late requests: arguments of ``late``."""
MOST_S = 60.0
"""Most work of a workload with objectives (seconds of a device)."""
BEST_PROPOSED = dict.fromkeys(FIGURES, "best proposed")


def lengths(rng: random.Random) -> Sizes:
    """Return random prompt lengths: log-normal, log-uniform, or one or two log-normal parts and long prompts."""
    middle, width = rng.choice((20, 60, 150, 400, 1200)), rng.choice((0.3, 0.8, 1.4))
    low = rng.choice((800, 2000, 6000))
    long = log_uniform(low, min(LONGEST, low * rng.choice((2, 8, 30))))
    share = rng.choice((0.005, 0.02, 0.08, 0.25, 0.5))

    def hump(at: float) -> Sizes:
        return lambda r: min(LONGEST, 1 + int(at * math.exp(r.gauss(0.0, width))))

    two = mix(hump(middle), hump(1500), 0.4)
    return rng.choice((hump(middle), log_uniform(16, LONGEST), mix(hump(middle), long, share), mix(two, long, share)))


def arrivals(rng: random.Random, burst: float, requests: int) -> Iterator[float]:
    """Yield the times of so many requests, one per second on average, in bursts of ``burst`` on average."""
    at_s = 0.0
    for _ in range(requests):
        # Mean pauses are as long as bursts, so the rate does not depend on ``burst``.
        at_s += rng.expovariate(1.0 / burst) if rng.random() < 1.0 / burst else 0.0
        yield at_s


def at_rate(jobs: Sequence[Job], rate: float) -> list[Job]:
    """Return the jobs at ``rate`` per second."""
    stretch = len(jobs) / (rate * max(jobs[-1].at_s, 1e-9))
    return [replace(job, at_s=job.at_s * stretch) for job in jobs]


def prompts(rng: random.Random, draw: Sizes, requests: int) -> list[Job]:
    """Return so many requests of random bursts, one per second on average, some with a history that is cached."""
    burst, cached = rng.choice((1, 1, 4, 20)), rng.choice((0.0, 0.0, 0.3, 0.9))
    jobs = list[Job]()
    for at_s in arrivals(rng, burst, requests):
        new = draw(rng)
        history = int(new * rng.uniform(0.0, 6.0)) if rng.random() < cached else 0
        jobs.append(Job(at_s, new, min(history, LONGEST)))
    return jobs


def workload(seed: int) -> tuple[Profile, float, list[Job]]:
    """Return a random device, the load as a share of fcfs's capacity, and the requests."""
    rng = random.Random(seed)
    profile, load, draw = Profile.load(rng.choice(PROFILES)), rng.choice(LOADS), lengths(rng)
    jobs = prompts(rng, draw, rng.choice(REQUESTS))
    return profile, load, at_rate(jobs, load * capacity(jobs, profile))


def figures(name: str, chunk: int, profile: Profile, jobs: Sequence[Job], **options: Any) -> list[float]:
    """Return the values of FIGURES for one policy. ``options``: of ``variants.run``."""
    numbered = Trace([replace(job, client=i) for i, job in enumerate(jobs)])
    record = run(name, numbered, profile, chunk=chunk, **{"overlap": True, **options}).record
    at, ttft, new = (np.asarray(found) for found in (record.at, record.ttft, record.new))
    slowdown = ttft / lone_s(profile, new, np.asarray(record.cached), CHUNK)
    # A server without a session's history computes more; the request still counts by its own new tokens.
    own = np.asarray([jobs[i].new for i in record.client])
    short_s, long_s = (
        quantile(ttft[mask], 90) for mask in (own <= np.quantile(own, 0.7), own >= np.quantile(own, 0.9))
    )
    return [float(ttft.mean()), float(slowdown.mean()), short_s, long_s, float((at + ttft).max())]


def over_best(
    mine: Sequence[float], others: Mapping[tuple[Any, ...], Sequence[float]], over: Mapping[str, str] = FIGURES
) -> dict[str, float]:
    """Return the ratios of figures to the best of those of ``others``, by (policy, ...), as ``over`` says."""
    found = {}
    for i, (name, rival) in enumerate(over.items()):
        rivals = [values[i] for (policy, *_), values in others.items() if rival.startswith("best") or policy == "fcfs"]
        found[name] = mine[i] / min(rivals)
    return found


def ratios(seed: int) -> dict[str, Any]:
    """Return a summary of a random workload, and the ratios of LAPS's figures to the stock figures in FIGURES;
    ``proposed``: to the best of PROPOSED."""
    profile, load, jobs = workload(seed)
    mine = figures("laps", CHUNK, profile, jobs)
    found = over_best(mine, {one: figures(*one, profile, jobs) for one in SETTINGS})
    proposed = over_best(mine, {one: figures(*one, profile, jobs) for one in PROPOSED}, BEST_PROPOSED)
    middle, longest = (int(np.quantile([job.new for job in jobs], q)) for q in (0.5, 1.0))
    about = {"seed": seed, "profile": profile.name, "load": load, "median": middle, "longest": longest}
    return {**about, **found, "proposed": proposed}


def add_ratios(
    piece: Piece, title: str, found: Sequence[Mapping[str, Any]], over: Mapping[str, str], where: str = ""
) -> None:
    """Add a table of ratios by figure (less is better). `over`: figures, and what each was divided by. `where`: begins
    the names of the piece's figures."""
    heads = ("figure of LAPS", "over", "middle", "9 of 10 below", "49 of 50 below", "largest", "at most 1.02")
    rows = []
    for name, stock in over.items():
        values = np.asarray([one[name] for one in found if one[name] is not None])
        each = [float(np.quantile(values, q)) for q in (0.5, 0.9, 0.98, 1.0)]
        rows.append((name, stock, *(f"{x:.2f}" for x in each), f"{float((values <= 1.02).mean()):.0%}"))
        piece.judge(f"{where}{name}, 9 of 10 workloads below", each[1])
    piece.tables.append(Table(title, heads, rows))


def objectives(rng: random.Random, profile: Profile, jobs: Sequence[Job]) -> list[Job]:
    """Return the jobs with random objectives, some without: multiples of the lone TTFT, or one for each tenant."""
    alone_s = lone_s(profile, [job.new for job in jobs], [job.cached for job in jobs], CHUNK)
    tight, wide, none = rng.choice((1.3, 2.0, 4.0)), rng.choice((2.0, 8.0, 30.0)), rng.choice((0.0, 0.0, 0.3, 0.7))
    middle_s = float(np.median(alone_s))
    tenants = [max(0.05, middle_s * math.exp(rng.uniform(0.4, 4.6))) for _ in range(rng.choice((0, 2, 3)))]
    own = (rng.choice(tenants) if tenants else tight * wide ** rng.random() * float(s) for s in alone_s)
    return [replace(job, slo_s=None if rng.random() < none else slo_s) for job, slo_s in zip(jobs, own, strict=True)]


def late(
    name: str, chunk: int, profile: Profile, jobs: Sequence[Job], *, knows: bool = False,
    knobs: Mapping[str, Any] | None = None,
) -> int:  # fmt: skip
    """Return the number of requests whose first token comes after their objective. `knows`: the server knows it."""
    given = [replace(job, client=i, slo_s=job.slo_s if knows else None) for i, job in enumerate(jobs)]
    record = run(name, Trace(given), profile, chunk=chunk, overlap=True, knobs=knobs).record
    slo_s = [math.inf if job.slo_s is None else job.slo_s for job in jobs]
    return sum(ttft > slo_s[i] for i, ttft in zip(record.client, record.ttft, strict=True))


def late_ratios(seed: int) -> dict[str, Any]:
    """Return the ratios of late requests of LAPS to those of others, by rival. One is added to each number."""
    profile, load, jobs = workload(seed)
    rng = random.Random(f"objectives {seed}")
    rate = capacity(jobs, profile)
    load = rng.choice((load, 1.0, 1.2))
    jobs = objectives(rng, profile, at_rate(jobs[: max(60, int(MOST_S * rate))], load * rate))
    mine = 1 + late("laps", CHUNK, profile, jobs, knows=True)
    stock = min(late(*one, profile, jobs) for one in SETTINGS)
    others = {name: late("laps", CHUNK, profile, jobs, **{"knows": True, **how}) for name, how in LATE.items()}
    return {"seed": seed, "load": load, **{name: mine / (1 + n) for name, n in {"stock": stock, **others}.items()}}


def run_all(one: Callable[[int], dict[str, Any]], args: Namespace) -> list[dict[str, Any]]:
    """Return the results of all workloads, which run one on each core. `one`: runs the workload of a seed."""
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(one, range(args.seed, args.seed + args.workloads), chunksize=2))


def measure(args: Namespace) -> Piece:
    found = run_all(ratios, args)
    text = (
        f"{len(found)} random workloads on Qwen3-8B, 32B or 30B-A3B, overlap loop. LAPS is the same in all; of "
        f"{len(SETTINGS)} stock settings each figure of each workload has the best, chosen in hindsight. "
        "Below 1: LAPS is better."
    )
    piece = Piece("sim-anything", "Workloads that nobody has chosen", text, args.seed)
    add_ratios(piece, "All workloads", found, FIGURES)
    title = "Over policies proposed for SGLang (several prompts in progress, chunk interleaving, PREFLOW)"
    add_ratios(piece, title, [one["proposed"] for one in found], BEST_PROPOSED, "proposed: ")
    due = run_all(late_ratios, args)
    over = {"stock": "best of stock", **dict.fromkeys(LATE, "the same requests")}
    add_ratios(piece, "Late requests, if each request has an objective of its own or none", due, over, "late: ")
    piece.data = {"workloads": found, "late": due}
    return piece


def command(name: str, doc: str | None, measure: Callable[[Namespace], Piece], workloads: int) -> Command:
    """Return the command of a study of random workloads. ``workloads``: their number by default."""

    def options(p: Parser) -> None:
        p.add_argument("--workloads", type=count, default=workloads, help=f"how many, of each kind ({workloads})")

    out = f"sim-{name.replace('_', '-')}"
    return Command(f"benchmark.sim.{name}", doc, measure, options, out=out, seed=1, every=True)


COMMAND = command("anything", __doc__, measure, 400)

if __name__ == "__main__":
    sys.exit(COMMAND.main())
