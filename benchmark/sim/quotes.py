"""Quoted times to first token against the outcomes, in the simulator.

    python -m benchmark.sim.quotes [--profiles NAME...] [--loads NAME...] [--shares 0.5 0.85]

Each load runs at shares of stock fcfs's capacity. All outcomes count, also the first.
"""

from __future__ import annotations

import random
import statistics
import sys
from functools import partial
from itertools import product

from laps_core.length import CLASSES
from laps_plan import profile as profiles
from laps_plan.profile import Profile
from laps_plan.sim import quoting
from laps_plan.traffic import named
from laps_plan.traffic.streams import Trace

from benchmark.results import Command, Namespace, Parser, Piece, Table
from benchmark.results.bars import INSIDE
from benchmark.sim.loads import CHUNK, SCALE, offer

LOADS = ("poisson", "azure", "code", "agents")
PROFILES = ("h200-qwen3-8b", "h200-qwen3-32b")
SHARES = (0.5, 0.85)
HEADS = ("", "requests", "inside", "short", "long", "below", "above", "width short", "long", "above the bound")


def options(p: Parser) -> None:
    p.add_argument("--profiles", nargs="+", default=PROFILES, help=f"{', '.join(profiles.names())}, or files")
    p.add_argument("--loads", nargs="+", default=LOADS, choices=list(named.OPEN))
    p.add_argument("--shares", nargs="+", type=float, default=SHARES, help="of what stock fcfs can do (0.5 0.85)")
    p.add_argument("--requests", type=int, default=3000, help="requests of each load (3000)")


def run(args: Namespace) -> Piece:
    text = (
        "Every request is quoted as it enters the queue; the table has the share of first tokens inside the interval."
    )
    table = Table("Outcomes against the quoted interval", HEADS, [])
    piece = Piece("sim-quotes", "Quoted times to first token", text, args.seed, [table])
    for name, load, share in product(args.profiles, args.loads, args.shares):
        profile, workload = Profile.load(name), named.make(load, SCALE)
        offered = offer(workload, share, profile, args.seed, requests=args.requests)
        trace = Trace(workload.arrivals(offered, random.Random(args.seed)))
        found = quoting.run(trace, profile, chunk=CHUNK, seed=args.seed)
        title = f"{name}, {load} {share:.0%}"
        table.rows = [*table.rows, (title, *_row(found))]
        piece.judge(f"inside the interval, {title}", quoting.inside(found), INSIDE)
    return piece


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


COMMAND = Command("benchmark.sim.quotes", __doc__, run, options, out="sim-quotes", seed=0, every=True)

if __name__ == "__main__":
    sys.exit(COMMAND.main())
