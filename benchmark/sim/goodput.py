"""Goodput: the highest rate at which 90% of the requests have their first token within their own objective, simulated.

    python -m benchmark.sim.goodput [--cases 32b]

FlowPrefill's metric: four tasks (text, image, search, file) with lengths and objectives of their own. Stock policies
and LAPS, with the objectives as deadlines or without.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from laps_plan.profile import Profile
from laps_plan.sim.variants import run
from laps_plan.traffic import tasks
from laps_plan.traffic.streams import Trace

from benchmark.results import Command, Namespace, Parser, Piece, Table, bars, count
from benchmark.rig import LAPS
from benchmark.sim.loads import capacity

SHARE = 0.9
"""Share of the requests that must be in time (0..1)."""
MOST = 1.5
"""Highest rate tried, over ``Study.limit``. In a short run a policy can exceed the limit a little."""
STEPS = 8
"""Bisection steps in the search for the highest rate."""
MANY = 5000
"""Requests from which the limit is computed."""
WARM = 0.1
"""Share of the time that is not counted."""
DRAIN_S = 30.0
"""Time after the last arrival and its objective until the simulation ends: requests without a first token are late
(seconds)."""


@dataclass(frozen=True)
class Way:
    """One way to serve."""

    policy: str
    """Policy of ``laps_plan.sim.variants.run``."""
    knobs: Mapping[str, Any] = field(default_factory=dict)
    knows_objectives: bool = False
    chunk: int = 8192


WAYS: dict[str, Way] = {
    "fcfs": Way("fcfs"),
    "hrrn": Way("hrrn"),
    "shortest-prefill-first": Way("shortest-prefill-first"),
    "shortest-prefill-first, 2048": Way("shortest-prefill-first", chunk=2048),
    "paper preset": Way(LAPS, {"preset": "paper"}, knows_objectives=True),
    "s-edf": Way(LAPS, {"order": "s-edf"}, knows_objectives=True),
    "lars": Way(LAPS, {"order": "lars"}, knows_objectives=True),
    "laps, no deadlines": Way(LAPS),
    "laps": Way(LAPS, knows_objectives=True),
}
LIMIT = "limit"
STOCK = tuple(name for name in WAYS if WAYS[name].policy != LAPS)
CASES = {
    "8b": ("h200-qwen3-8b", "8b"),
    "32b": ("h200-qwen3-32b", "32b"),
    "ranks": ("h200-deepseek-v3-dp8", "70b"),
}
"""Profile, and the model whose objectives apply. ``ranks``: data-parallel ranks, on which deadlines have no effect."""


@dataclass(frozen=True)
class Study:
    """Device, load and criterion of the study."""

    profile: Profile
    model: str
    requests: int
    seeds: Sequence[int]

    def in_time(self, way: Way, rate: float) -> float:
        """Return the share of requests in time (0..1)."""
        met = due = 0
        for seed in self.seeds:
            rows = tasks.jobs(rate, self.requests, self.model, seed)
            begin_s = rows[0].at_s + WARM * (rows[-1].at_s - rows[0].at_s)
            objective_s = {job.at_s: job.slo_s or 0.0 for job in rows if job.at_s >= begin_s}
            jobs = rows if way.knows_objectives else [replace(job, slo_s=None) for job in rows]
            until_s = rows[-1].at_s + max(objective_s.values()) + DRAIN_S
            record = run(
                way.policy, Trace(jobs), self.profile, chunk=way.chunk, knobs=way.knobs, seed=seed,
                until_s=until_s,
            ).record  # fmt: skip
            due += len(objective_s)
            met += sum(ttft <= objective_s.get(at, 0.0) for at, ttft in zip(record.at, record.ttft, strict=True))
        return met / due

    def goodput(self, way: Way, most: float) -> float:
        """Return the goodput (requests/s), between 0 and ``most``, by bisection."""
        good, bad = 0.0, most
        for _ in range(STEPS):
            middle = (good + bad) / 2
            good, bad = (middle, bad) if self.in_time(way, middle) >= SHARE else (good, middle)
        return good

    def limit(self) -> float:
        """Return the requests/s of a device that computes all requests but the largest, as many as may be late, and
        never idles: no policy has a higher goodput for long."""
        jobs = tasks.jobs(100.0, MANY, self.model, self.seeds[0])
        shortest = sorted(jobs, key=lambda job: job.new)[: round(SHARE * len(jobs))]
        return capacity(shortest, self.profile) / SHARE


def options(p: Parser) -> None:
    p.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    p.add_argument("--requests", type=count, default=1500, help="requests per simulation, about (1500)")
    p.add_argument("--seeds", type=count, default=2)


def search(args: Namespace) -> Piece:
    seeds = range(args.seed, args.seed + args.seeds)
    named = "; ".join(f"{case}: {profile}, objectives of {model}" for case, (profile, model) in CASES.items())
    text = (
        f"Simulated: {SHARE:.0%} of the requests are in time. {args.requests} requests, {args.seeds} seeds; lengths "
        "log-normal around the means of the tasks. Limit: a device that never idles computes all requests but the "
        f"largest {1 - SHARE:.0%}. {named}."
    )
    piece = Piece("goodput", "Goodput", text, args.seed)
    found: dict[str, dict[str, float]] = {}
    for case in args.cases:
        profile, model = Profile.load(CASES[case][0]), CASES[case][1]
        ways = [name for name in WAYS if profile.group is None or name in (*STOCK, LAPS)]
        study = Study(profile, model, args.requests, seeds)
        limit = study.limit()
        with ProcessPoolExecutor() as pool:
            searches = {n: pool.submit(study.goodput, WAYS[n], MOST * limit) for n in ways}
        rates = {name: one.result() for name, one in searches.items()}
        found[case] = {LIMIT: limit, **rates}
        args.say(f"{case}: " + ", ".join(f"{name} {rate:.1f}" for name, rate in rates.items()))
        best = max(STOCK, key=lambda name: rates[name])
        for name, bar in ((best, bars.GOODPUT), ("s-edf", bars.GOODPUT_ORDER)):
            if rates.get(name):
                piece.judge(f"{case}: goodput, laps / {name}", rates[LAPS] / rates[name], bar)
    rows = [(name, *(f"{of[name]:.1f}" if name in of else "" for of in found.values())) for name in (LIMIT, *WAYS)]
    piece.tables, piece.data = [Table("Goodput", ("requests/s", *found), rows)], found
    return piece


COMMAND = Command("benchmark.sim.goodput", __doc__, search, options, out="goodput", seed=1, every=True)

if __name__ == "__main__":
    sys.exit(COMMAND.main())
