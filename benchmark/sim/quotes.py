"""Quoted times to first token against what became of them, in the simulator.

python -m benchmark.sim.quotes
python -m benchmark.sim.quotes --profiles cpu --loads azure --shares 0.85

Each load runs at shares of what stock fcfs can do; all outcomes count, the first too.
"""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from laps_core.length import CLASSES
from laps_plan import profile as profiles
from laps_plan.profile import Profile
from laps_plan.sim import quoting
from laps_plan.sim.metrics import lone_s
from laps_plan.sim.variants import VARIANTS, run
from laps_plan.traffic import named
from laps_plan.traffic.job import Job
from laps_plan.traffic.streams import Trace

from benchmark.results.bars import Bar
from benchmark.results.piece import Figure, Piece, Table, parser
from benchmark.sim.loads import CHUNK, SAMPLE, SCALE

LOADS = ("poisson", "azure", "code", "agents")
PROFILES = ("h200-qwen3-8b", "cpu")
SHARES = (0.5, 0.85)
SCALES = {"cpu": named.Scale(4096, 2048)}
"""Lengths where those of a GPU are too long."""
INSIDE = Bar(0.85, 0.75)
"""Share of outcomes inside the interval, which is to hold 80%."""


def main(argv: Sequence[str] | None = None) -> int:
    p = parser("python -m benchmark.sim.quotes", __doc__, "sim-quotes", seed=0, whole=True)
    p.add_argument("--profiles", nargs="+", default=PROFILES, help=f"{', '.join(profiles.names())}, or files")
    p.add_argument("--loads", nargs="+", default=LOADS, choices=list(named.OPEN))
    p.add_argument("--shares", nargs="+", type=float, default=SHARES, help="of what stock fcfs can do (0.5 0.85)")
    p.add_argument("--requests", type=int, default=3000, help="of each load (3000)")
    p.add_argument("--overlap", action="store_true", help="with SGLang's overlap loop")
    args = p.parse_args(argv)
    rows, figures = [], []
    for name in args.profiles:
        profile = Profile.load(name)
        for load in args.loads:
            for share in args.shares:
                workload = named.make(load, SCALES.get(name, SCALE))
                jobs = _jobs(workload, share, profile, args.requests, args.seed)
                found = quoting.run(Trace(jobs), profile, chunk=CHUNK, overlap=args.overlap, seed=args.seed)
                rows.append((f"{name}, {load} {share:.0%}", *_row(found)))
                figures.append(Figure.of(f"inside the interval, {rows[-1][0]}", quoting.inside(found), INSIDE))
    piece = Piece(
        "sim-quotes",
        "Quoted times to first token",
        "Every request is quoted as it enters the queue; the table has the share of first tokens inside the interval.",
        args.seed,
        [Table("Outcomes against the quoted interval", HEADS, rows)],
        figures,
    )
    piece.leave(args.out, "benchmark.sim.quotes", argv, every=True)
    return 0


def _jobs(workload: named.Workload, share: float, profile: Profile, requests: int, seed: int) -> list[Job]:
    """So many requests at a share of stock fcfs's capacity, which is that of a sample with all of it waiting."""
    sample = workload.sample(SAMPLE, random.Random(f"{seed} sample"))
    waiting = Trace([replace(job, at_s=0.0, after=None) for job in sample])
    capacity = run(VARIANTS["fcfs"], waiting, profile, chunk=CHUNK).rate
    alone = partial(_alone_s, profile)
    return workload.arrivals(named.Offer(share, requests / (share * capacity), capacity, alone), random.Random(seed))


def _alone_s(profile: Profile, new: int) -> float:
    return float(lone_s(profile, [new], [0], CHUNK)[0])


HEADS = ("", "requests", "inside", "short", "long", "below", "above", "width short", "long", "above the bound")


def _row(found: list[quoting.Outcome]) -> tuple[str, ...]:
    inside = partial(quoting.inside, found)
    sides = [o.side for o in found]
    widths = []
    for cls in CLASSES:
        ratios = [o.quoted.high_s / o.quoted.low_s for o in found if o.cls == cls and o.quoted.low_s > 0.0]
        widths.append(f"{statistics.median(ratios):.1f}x" if ratios else "-")
    broken = sum(o.quoted.bound_s is not None and o.measured_s > o.quoted.bound_s for o in found)
    return (
        str(len(found)), *(f"{inside(cls):.1%}" for cls in (None, *CLASSES)),
        *(f"{sides.count(side) / max(1, len(sides)):.1%}" for side in ("below", "above")), *widths, str(broken),
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
