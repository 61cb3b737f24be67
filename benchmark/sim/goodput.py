"""Goodput: the highest rate at which 90% of the requests have their first token within their own objective, simulated.

    python -m benchmark.sim.goodput [--profile h200-qwen3-32b --model 32b] [--scales 0.5 1 2]

FlowPrefill's metric: four tasks (text, image, search, file) with lengths and objectives of their own. Stock policies
and LAPS, with the objectives as deadlines or without.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from laps_plan.profile import Profile
from laps_plan.sim.variants import VARIANTS, run
from laps_plan.traffic import tasks
from laps_plan.traffic.streams import Trace

from benchmark.results import Command, Figure, Namespace, Parser, Piece, Table, count, positive
from benchmark.sim.loads import SAMPLE, capacity

SHARE = 0.9
"""Share of the requests that must be in time (0..1)."""
MOST = 3.0
"""Highest rate tried, over the capacity of stock fcfs. A policy without the largest prompts can exceed 1."""
STEPS = 8
"""Bisection steps in the search for the highest rate."""
WARM = 0.1
"""Share of the time that is not counted."""
DRAIN_S = 30.0
"""Time after the last arrival and its objective until the simulation ends: requests without a first token are late
(seconds)."""


@dataclass(frozen=True)
class Way:
    """One way to serve."""

    policy: str
    """Name of the policy in ``laps_plan.sim.variants.VARIANTS``."""
    knobs: Mapping[str, Any] = field(default_factory=dict)
    knows_objectives: bool = False
    """True if the server knows the objectives."""
    chunk: int = 8192


WAYS: dict[str, Way] = {
    "fcfs": Way("fcfs"),
    "hrrn": Way("hrrn"),
    "shortest-prefill-first": Way("shortest-prefill-first"),
    "shortest-prefill-first, 2048": Way("shortest-prefill-first", chunk=2048),
    "paper preset": Way("paper", knows_objectives=True),
    "s-edf": Way("laps", {"order": "s-edf"}, knows_objectives=True),
    "lars": Way("laps", {"order": "lars"}, knows_objectives=True),
    "laps, no deadlines": Way("laps"),
    "laps": Way("laps", knows_objectives=True),
}
STOCK = tuple(name for name in WAYS if VARIANTS[WAYS[name].policy].policy)


@dataclass(frozen=True)
class Study:
    """Device, load and criterion of the study."""

    profile: Profile
    model: str
    requests: int
    seeds: Sequence[int]
    each: bool = False
    """True if each task must be in time, not all requests together."""

    def in_time(self, way: Way, rate: float, scale: float) -> float:
        """Return the share of requests in time (0..1): of all requests, or with ``each``, of the worst task's."""
        met, due = Counter[float](), Counter[float]()
        for seed in self.seeds:
            rows = tasks.jobs(rate, self.requests, self.model, scale, seed)
            begin_s = rows[0].at_s + WARM * (rows[-1].at_s - rows[0].at_s)
            objective_s = {job.at_s: job.slo_s or 0.0 for job in rows if job.at_s >= begin_s}
            jobs = rows if way.knows_objectives else [replace(job, slo_s=None) for job in rows]
            until_s = rows[-1].at_s + max(objective_s.values()) + DRAIN_S
            record = run(
                VARIANTS[way.policy], Trace(jobs), self.profile, chunk=way.chunk, knobs=way.knobs, seed=seed,
                until_s=until_s,
            ).record  # fmt: skip
            due.update(objective_s.values())
            for at, ttft in zip(record.at, record.ttft, strict=True):
                met[objective_s.get(at, 0.0)] += ttft <= objective_s.get(at, 0.0)
        return min(met[s] / n for s, n in due.items()) if self.each else met.total() / due.total()

    def goodput(self, way: Way, scale: float, most: float) -> float:
        """Return the goodput (requests/s), between 0 and ``most``, by bisection."""
        good, bad = 0.0, most
        for _ in range(STEPS):
            middle = (good + bad) / 2
            good, bad = (middle, bad) if self.in_time(way, middle, scale) >= SHARE else (good, middle)
        return good

    def capacity(self) -> float:
        """Return stock fcfs's capacity with all requests waiting (requests/s)."""
        return capacity(tasks.jobs(100.0, SAMPLE, self.model, 1.0, self.seeds[0]), self.profile)


def options(p: Parser) -> None:
    """Add the options of this command."""
    p.add_argument("--profile", default="h200-qwen3-8b")
    p.add_argument("--model", choices=list(tasks.OBJECTIVES_S), default="8b", help="model whose objectives apply (8b)")
    p.add_argument("--scales", type=positive, nargs="+", default=[1.0], help="factors on the objectives (1)")
    p.add_argument("--requests", type=count, default=1500, help="requests per simulation, about (1500)")
    p.add_argument("--seeds", type=count, default=2)
    p.add_argument("--each", action="store_true", help="require 90%% of each task, not of all requests")
    p.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))


def search(args: Namespace) -> Piece:
    """Search the goodput of all ways at all scales."""
    seeds = range(args.seed, args.seed + args.seeds)
    study = Study(Profile.load(args.profile), args.model, args.requests, seeds, args.each)
    most, found = MOST * study.capacity(), dict[str, dict[str, float]]()
    for scale in args.scales:
        for name in args.ways:
            rate = found.setdefault(f"{scale:g}", {})[name] = study.goodput(WAYS[name], scale, most)
            args.say(f"objectives x {scale:g}, {name}: {rate:.1f} requests/s")
    rows = [(name, *(f"{of[name]:.1f}" for of in found.values())) for name in args.ways]
    figures = []
    for at, rates in found.items():
        best = max((rates[name] for name in STOCK if name in rates), default=0.0)
        others = {"the best stock policy": best, "s-edf": rates.get("s-edf", 0.0), "lars": rates.get("lars", 0.0)}
        named = [(f"objectives x {at}: goodput, laps / {words}", rate) for words, rate in others.items()]
        figures += [Figure(words, rates["laps"] / rate) for words, rate in named if rates.get("laps") and rate]
    text = (
        f"Simulated: profile {study.profile.name} ({study.profile.source}); {SHARE:.0%} of the "
        f"requests{' of each task' if args.each else ''} in time, "
        f"objectives of {args.model}, {args.requests} requests, {args.seeds} seeds. Lengths log-normal around the "
        "means of the tasks."
    )
    table = Table("Goodput", ("requests/s", *(f"objectives x {at}" for at in found)), rows)
    return Piece("goodput", "Goodput", text, args.seed, [table], figures, data=found)


COMMAND = Command("benchmark.sim.goodput", __doc__, search, options, out="goodput", seed=1, every=True)

if __name__ == "__main__":
    sys.exit(COMMAND.main())
