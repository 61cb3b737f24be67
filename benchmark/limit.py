"""Distance of each policy from the best that any could do, simulated.

    python -m benchmark.limit [--profile NAME] [--loads mixed azure] [--seeds 3]

An oracle that knows all sizes and costs (``laps_plan.sim.oracle``) runs with many aims, on the same arrivals as stock
policies and LAPS. The lower left edge of all runs, the policies' included, is the best known frontier of (short P90,
long P90): once with pauses where LAPS can pause, once with pauses anywhere.
"""

from __future__ import annotations

import math
import random
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from laps_core.config import LapsConfig
from laps_plan import pictures
from laps_plan.profile import Profile
from laps_plan.sim import oracle
from laps_plan.sim.metrics import Outcome, lone_s
from laps_plan.sim.oracle import Aim
from laps_plan.sim.variants import VARIANTS, run
from laps_plan.traffic import named
from laps_plan.traffic.job import LONG, THRESHOLD, Job
from laps_plan.traffic.streams import Trace

from benchmark.results.bars import FROM_LIMIT
from benchmark.results.frontier import Point, distance, envelope, shared
from benchmark.results.piece import Figure, Piece, Table, parser
from benchmark.rig.devices import CPU, CUDA, DEVICES
from benchmark.rig.progress import Progress

POLICIES = ("fcfs", "hrrn", "shortest-prefill-first", "laps")
UTILISATIONS = (0.7, 0.85)
SAMPLE, WARM = 600, 0.05
LONGEST_S = 150.0
"""Longest simulated time of one run (seconds)."""
LONG_CHUNKS = 4
"""Length of a usual long prompt, in chunks."""
LEAST_LONG = 8
"""Least number of long requests in a run, if ``LONGEST_S`` allows."""
SLICES, PATIENT, FREE = "our slices", "nobody given up", "pauses anywhere"
SLOWDOWN = "smallest size x remaining first"


class Seen(NamedTuple):
    """Figures of one simulation."""

    short_s: float
    """P90 TTFT (seconds)."""
    long_s: float
    slowdown: float
    """Mean ratio of TTFT to that of the same request alone."""

    @property
    def point(self) -> Point:
        """Return the point in the frontier's plane."""
        return self.short_s, self.long_s


NEVER = math.inf, math.inf


class Tried(NamedTuple):
    """An order to try. ``late``: time after which a short, a long request is given up, over P90s of the first order."""

    aim: Aim
    late: tuple[float, float] = NEVER
    gap: float = 0.0
    """Least time between preemptions, in a step's fixed times."""


def _tried() -> dict[str, list[Tried]]:
    never = math.inf
    both = [
        Tried(Aim(boost=16.0)),
        *(Tried(Aim(boost=b)) for b in (0.03, 0.3, 1.0)),
        Tried(Aim(boost=4.0, ahead=8.0)),
        Tried(Aim(boost=16.0), gap=20.0),
        *(Tried(Aim(boost=64.0), (never, late)) for late in (1.0, 0.8, 0.65, 0.5)),
        Tried(Aim(boost=4.0, ahead=8.0), (1.3, 0.7)),
    ]
    more = [
        Tried(Aim(boost=0.1)),
        *(Tried(Aim(boost=4.0, ahead=a)) for a in (1.0, 16.0)),
        *(Tried(Aim(boost=16.0), gap=g) for g in (2.0, 6.0, 80.0)),
        Tried(Aim(boost=16.0, ahead=16.0), gap=6.0),
        Tried(Aim(boost=0.3, ahead=4.0)),
        Tried(Aim(boost=4.0, power=1.0)),
        *(Tried(Aim(boost=16.0, ahead=8.0), (never, late)) for late in (1.0, 0.8)),
        Tried(Aim(boost=1.0), (never, 0.65)),
        Tried(Aim(boost=0.1), (never, 0.65)),
    ]
    return {SLICES: both + more, FREE: both}


TRIED = _tried()
SHORTEST = Tried(Aim(power=1.0))


@dataclass(frozen=True)
class Load:
    """One workload at one load, and the device that serves it."""

    workload: named.Workload
    utilisation: float
    profile: Profile
    chunk: int
    requests: int

    def arrivals(self, seed: int) -> list[Job]:
        """Return jobs at a share of stock fcfs's capacity, measured on the workload's sample, all of it waiting."""
        sample = self.workload.sample(SAMPLE, random.Random(f"{seed} sample"))
        waiting = Trace([replace(job, at_s=0.0, after=None) for job in sample])
        capacity = run(VARIANTS["fcfs"], waiting, self.profile, chunk=self.chunk).rate
        span_s = min(LONGEST_S, self.requests / (self.utilisation * capacity))
        offer = named.Offer(self.utilisation, span_s, capacity, lambda new: float(self.alone_s([new], [0])[0]))
        rows = self.workload.arrivals(offer, random.Random(seed))
        long = sum(job.kind == LONG for job in rows)
        if long >= LEAST_LONG or span_s >= LONGEST_S:
            return rows
        longer = replace(offer, span_s=min(LONGEST_S, span_s * LEAST_LONG / max(1, long)))
        return self.workload.arrivals(longer, random.Random(seed))

    def alone_s(self, new: Sequence[int], cached: Sequence[int]) -> Any:
        """Return the TTFT of each request alone (seconds)."""
        return lone_s(self.profile, list(new), list(cached), self.chunk)

    def seen(self, outcome: Outcome) -> Seen:
        """Return the figures of an outcome."""
        groups = outcome.groups(THRESHOLD, warm=WARM)
        short_s, long_s = (groups[kind].ttft["p90"] for kind in ("short", "long"))
        record = outcome.record
        slowdown = np.asarray(record.ttft) / self.alone_s(record.new, record.cached)
        return Seen(short_s, long_s, float(slowdown.mean()))

    def policy(self, name: str, rows: Sequence[Job], seed: int) -> Seen:
        """Return the figures of a policy."""
        return self.seen(run(VARIANTS[name], Trace(rows), self.profile, chunk=self.chunk, seed=seed))

    def order(self, tried: Tried, rows: Sequence[Job], mode: str, seed: int, first: Seen | None = None) -> Seen:
        """Return the figures of one of the oracle's orders; ``first``: figures of the first order."""
        late_s = tried.late if first is None else (tried.late[0] * first.short_s, tried.late[1] * first.long_s)
        c = self.profile.coefficients
        aim = replace(tried.aim, late_s=late_s, gap_s=tried.gap * (c.step_s))
        slice_s = LapsConfig().slice_ms / 1e3 if mode == SLICES else None
        outcome = oracle.run(
            aim, Trace(rows), self.profile, chunk=self.chunk, slice_s=slice_s, threshold=THRESHOLD, seed=seed
        )
        return self.seen(outcome)

    def case(self, seeds: Sequence[int]) -> Case:
        """Run all policies and all orders on the same arrivals."""
        policies: dict[str, list[Seen]] = {name: [] for name in POLICIES}
        orders: dict[str, list[list[Seen]]] = {mode: [[] for _ in tried] for mode, tried in TRIED.items()}
        slowdowns: list[float] = []
        for seed in seeds:
            rows = self.arrivals(seed)
            for name, seen in policies.items():
                seen.append(self.policy(name, rows, seed))
            for mode, tried in TRIED.items():
                first: Seen | None = None
                for one, at in zip(tried, orders[mode], strict=True):
                    at.append(self.order(one, rows, mode, seed, first))
                    first = first or at[-1]
            slowdowns.append(self.order(SHORTEST, rows, SLICES, seed).slowdown)
        return Case(
            {name: middle(seen) for name, seen in policies.items()},
            {mode: [middle(seen) for seen in found] for mode, found in orders.items()},
            statistics.median(slowdowns),
        )


def middle(seen: Sequence[Seen]) -> Seen:
    """Return medians over seeds, so that one lucky seed makes no frontier."""
    return Seen(*(statistics.median(figures) for figures in zip(*seen, strict=True)))


@dataclass
class Case:
    """Figures of a load: medians over seeds."""

    policies: dict[str, Seen]
    orders: dict[str, list[Seen]]
    """With our slices, and with pauses anywhere; in the order of ``TRIED``."""
    slowdown: float
    """Mean slowdown of smallest size x remaining work first with our slices."""
    frontiers: dict[str, list[Point]] = field(init=False)

    def __post_init__(self) -> None:
        known = [s.point for s in self.policies.values()]
        slices, free = ([s.point for s in self.orders[mode]] for mode in (SLICES, FREE))
        kept = [at for at, tried in zip(slices, TRIED[SLICES], strict=True) if tried.late == NEVER]
        self.frontiers = {
            SLICES: envelope(known + slices), PATIENT: envelope(known + kept), FREE: envelope(known + slices + free),
        }  # fmt: skip

    def distance(self, name: str, frontier: str = SLICES) -> float:
        """Return a policy's distance from a frontier."""
        return distance(self.policies[name].point, self.frontiers[frontier])

    @property
    def left(self) -> float:
        """Return LAPS's distance over that of stock fcfs."""
        mine, stock = self.distance("laps"), self.distance("fcfs")
        return mine / stock if stock else (0.0 if not mine else math.inf)

    def rows(self) -> list[Sequence[str]]:
        """Return the rows of the table."""
        return [
            (
                name, *(f"{1e3 * v:.1f}" for v in seen.point),
                *(f"{self.distance(name, frontier):.2f}" for frontier in (SLICES, PATIENT, FREE)),
                f"{shared(seen.point, self.frontiers[SLICES]):.2f}", f"{seen.slowdown / self.slowdown:.2f}",
            )
            for name, seen in self.policies.items()
        ]  # fmt: skip


def picture(cases: Mapping[float, Case], path: Path, title: str) -> None:
    """Draw policies and frontiers, one panel per load."""
    from matplotlib import ticker

    with pictures.axes(len(cases), path, title) as each:
        for axis, (utilisation, case) in zip(each, cases.items(), strict=True):
            for label, style in ((FREE, ":"), (PATIENT, "--"), (SLICES, "-")):
                x, y = zip(*((1e3 * a, 1e3 * b) for a, b in case.frontiers[label]), strict=True)
                axis.step(x, y, style, where="post", color="#555555", linewidth=1.2, label=f"frontier, {label}")
            for name, seen in case.policies.items():
                axis.plot(1e3 * seen.short_s, 1e3 * seen.long_s, "o", color=pictures.COLOURS[name], label=name)
            axis.set(xscale="log", yscale="log", xlabel="short P90 TTFT (ms)", ylabel="long P90 TTFT (ms)")
            axis.set_title(f"{utilisation:.0%} load", fontsize=10)
            for side in (axis.xaxis, axis.yaxis):
                side.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
                side.set_major_formatter(ticker.ScalarFormatter())
                side.set_minor_locator(ticker.NullLocator())
            axis.grid(alpha=0.3)
        handles, labels = each[0].get_legend_handles_labels()
        each[0].figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=7)


HEADS = (
    "", "short P90 ms", "long P90 ms", "distance", PATIENT, FREE, "both at once", "mean slowdown over best"
)  # fmt: skip
NOTE = (
    "Distance: natural log of the geometric mean of short and long P90, over the least on the frontier; first with "
    "pauses where LAPS can pause, then to the orders that never give up a late request, then with pauses anywhere. "
    "Both at once: log of the largest factor by which both could shrink together; 0 = on the frontier. Best mean "
    f"slowdown: {SLOWDOWN}."
)


def piece(loads: Mapping[str, Mapping[float, Load]], seeds: Sequence[int], out: Path, say: Progress) -> Piece:
    """Run all loads and return the piece."""
    made = Piece("limit", "How far from the limit", "", seeds[0])
    for name, by_utilisation in loads.items():
        cases: dict[float, Case] = {}
        for utilisation, load in by_utilisation.items():
            say(f"{name} at {utilisation:.0%}")
            case = cases[utilisation] = load.case(seeds)
            made.tables.append(
                Table(f"{name} at {utilisation:.0%}", HEADS, case.rows(), NOTE if not made.tables else "")
            )
            label = f"{name} at {utilisation:.0%}"
            made.figures.append(Figure.of(f"{label}: distance to the frontier, LAPS / fcfs", case.left, FROM_LIMIT))
            over = case.policies["laps"].slowdown / case.slowdown
            made.figures.append(Figure(f"{label}: mean slowdown of LAPS over {SLOWDOWN}", over))
        picture(cases, out / f"{name}.svg", name)
        made.pictures[f"{name}.svg"] = (
            f"{name}: policies and the best known frontier (simulated; lower left is better)."
        )
        made.data[name] = {
            f"{u:g}": {
                "policies": {n: s._asdict() for n, s in case.policies.items()},
                "orders": {mode: [s._asdict() for s in seen] for mode, seen in case.orders.items()},
                "frontiers": case.frontiers,
                "slowdown": case.slowdown,
            }
            for u, case in cases.items()
        }
    made.data["tried"] = {
        mode: [{**asdict(t.aim), "late": t.late, "gap": t.gap} for t in tried] for mode, tried in TRIED.items()
    }
    return made


def main(argv: Sequence[str] | None = None) -> int:
    p = parser("python -m benchmark.limit", __doc__, "limit", seed=1, whole=True)
    p.add_argument("--profile", default="h200-qwen3-8b")
    p.add_argument("--loads", nargs="+", choices=list(named.OPEN), default=list(named.OPEN))
    p.add_argument("--utilisations", nargs="+", type=float, default=UTILISATIONS)
    p.add_argument("--seeds", type=int, default=3)
    p.add_argument("--requests", type=int, default=1000, help="requests per simulation, about (1000)")
    args = p.parse_args(argv)
    if args.seeds < 1 or args.requests < 100 or min(args.utilisations) <= 0.0:
        p.error("--seeds: at least 1, --requests: at least 100, --utilisations: more than 0")
    profile = Profile.load(args.profile)
    device = DEVICES[CPU if profile.name == CPU else CUDA]
    scale = named.Scale(device.longest, min(device.longest, LONG_CHUNKS * device.chunk))
    loads = {
        name: {u: Load(named.make(name, scale), u, profile, device.chunk, args.requests) for u in args.utilisations}
        for name in args.loads
    }
    made = piece(loads, range(args.seed, args.seed + args.seeds), args.out, Progress())
    made.text = (
        f"Simulated: profile {profile.name} ({profile.source}), chunks of {device.chunk} tokens, prompts of up to "
        f"{device.longest}. Load: of what stock fcfs does with all requests waiting. An oracle that knows sizes and "
        f"costs runs the same arrivals in {sum(map(len, TRIED.values()))} orders; the frontier is the lower left edge "
        f"of all runs, those of the policies too. Medians over {args.seeds} seeds."
    )
    made.leave(args.out, "benchmark.limit", argv)
    return 0


if __name__ == "__main__":
    sys.exit(main())
