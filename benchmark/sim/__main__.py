"""One simulation from the command line.

python -m benchmark.sim --profile h200-qwen3-8b --variants fcfs dual laps --load closed --clients 32
python -m benchmark.sim --load azure --utilisation 0.7
python -m benchmark.sim --load mixed --servers 8 --routers least-load pools --utilisation 0.8
python -m benchmark.sim --variants laps --requests 1000000     how long a million takes
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from laps_plan import profile as profiles
from laps_plan.profile import Profile
from laps_plan.sim.metrics import Outcome, lone_s
from laps_plan.sim.variants import ROUTERS, VARIANTS, run
from laps_plan.traffic import named
from laps_plan.traffic.job import Job
from laps_plan.traffic.lengths import Sizes, lmsys, log_uniform, mix
from laps_plan.traffic.streams import Closed, Jobs, Sessions, Stream, Trace

from benchmark.results.piece import Figure, Piece, Table, parser

FOLLOWING = ("closed", "jobs", "sessions")
"""Loads that follow answers; the others are those of ``benchmark.serve``, by name."""
SAMPLE = 600


def mean_service_s(profile: Profile, jobs: Sequence[Job], chunk: int | None) -> float:
    """Device and step host time of a mean job served alone (seconds): what utilisation is told from."""
    around = profile.front_s + profile.reply_s
    alone = lone_s(profile, [job.new for job in jobs], [job.cached for job in jobs], chunk)
    return float(sum(alone - around)) / len(jobs)


def stream(args: argparse.Namespace, profile: Profile, servers: int) -> Stream:
    """The load that was asked for; new for each run."""
    slo_s = None if args.slo_ms is None or not args.deadlines else args.slo_ms / 1e3
    n, seed = args.requests, args.seed
    if args.load in FOLLOWING:
        sizes: Sizes = mix(lmsys(256), log_uniform(*args.long), args.long_share)
        if args.load == "closed":
            return Closed(sizes, args.clients, n, seed, slo_s)
        if args.load == "jobs":
            return Jobs(sizes, args.clients, n, seed, slo_s)
        return Sessions(sizes, args.clients, n, seed, slo_s)
    workload = named.make(args.load, named.Scale(args.longest, args.long[1]))
    capacity = servers / mean_service_s(profile, workload.sample(SAMPLE, random.Random(f"{seed} sample")), args.chunk)
    utilisation = args.utilisation if args.rate is None else args.rate / capacity
    offer = named.Offer(
        utilisation, n / (utilisation * capacity), capacity, lambda new: float(lone_s(profile, new, 0, args.chunk))
    )
    return Trace(workload.arrivals(offer, random.Random(seed)), slo_s=slo_s)


def cached_share(outcome: Outcome) -> float:
    """Share of all prompts' tokens that servers found in their caches (0..1)."""
    cached, new = sum(outcome.record.cached), sum(outcome.record.new)
    return cached / max(1, cached + new)


def row(name: str, outcome: Outcome, slo_s: float | None, threshold: int) -> tuple[str, ...]:
    """One line of the table."""
    groups = outcome.groups(threshold, slo_s, warm=0.05)
    both = (groups["short"], groups["long"])
    return (
        name, f"{outcome.rate:.1f}", f"{outcome.utilisation:.2f}", f"{cached_share(outcome):.1%}",
        *(f"{1e3 * g.ttft[q]:.1f}" if g.requests else "-" for g in both for q in ("p50", "p90", "p99")),
        *(f"{g.slowdown['p90']:.1f}" if g.requests else "-" for g in both),
        *(f"{g.longest_wait:.2f}" if g.requests else "-" for g in both),
        *("-" if g.violations is None else f"{100 * g.violations:.1f}%" for g in both), str(len(outcome.moves)),
    )  # fmt: skip


HEADS = (
    "", "req/s", "busy", "cached", "short P50", "P90", "P99 ms", "long P50", "P90", "P99 ms", "slowdown P90 s", "l",
    "longest wait s", "l (s)", "over SLO s", "l", "moves",
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    p = parser("python -m benchmark.sim", __doc__, "sim", seed=0, whole=True)
    p.add_argument("--profile", default="h200-qwen3-8b", help=f"{', '.join(profiles.names())}, or a file")
    p.add_argument("--variants", nargs="+", default=["fcfs", "dual", "laps"], choices=list(VARIANTS))
    p.add_argument("--routers", nargs="+", default=["least-load"], choices=ROUTERS, help="with --servers > 1")
    p.add_argument("--servers", type=int, default=1)
    p.add_argument("--load", default="mixed", choices=(*FOLLOWING, *named.OPEN))
    p.add_argument("--requests", type=int, default=20_000, help="about so many")
    p.add_argument("--utilisation", type=float, default=0.6, help="of the devices, if no two were ever batched")
    p.add_argument("--rate", type=float, help="requests/s instead of a utilisation")
    p.add_argument("--clients", type=int, default=32, help="closed loop, jobs, sessions")
    p.add_argument("--long-share", type=float, default=0.1, help="closed loop, jobs, sessions")
    p.add_argument("--long", type=int, nargs=2, default=(1024, 8192), metavar=("LOW", "HIGH"), help="tokens")
    p.add_argument("--longest", type=int, default=100_000, help="longest prompt of the other loads (tokens)")
    p.add_argument("--chunk", type=int, default=8192)
    p.add_argument("--slo-ms", type=float, help="TTFT that counts as met")
    p.add_argument("--deadlines", action="store_true", help="tell the servers the SLO as a deadline")
    p.add_argument("--knobs", type=json.loads, default={}, help="LAPS knobs as JSON, see laps_core/config.py")
    args = p.parse_args(argv)
    profile = Profile.load(args.profile)
    slo_s = None if args.slo_ms is None else args.slo_ms / 1e3
    threshold = args.knobs.get("length_threshold", 256)
    rows: list[Sequence[str]] = []
    data = {}
    took_s = 0.0
    for name in args.variants:
        for router in args.routers if args.servers > 1 else [""]:
            begin = time.perf_counter()
            outcome = run(
                VARIANTS[name], stream(args, profile, args.servers), profile, servers=args.servers,
                router=router or "least-load", chunk=args.chunk, knobs=args.knobs, seed=args.seed,
            )  # fmt: skip
            took_s = time.perf_counter() - begin
            label = f"{name}, {router}" if router else name
            rows.append((*row(label, outcome, slo_s, threshold), f"{took_s:.1f}"))
            data[label] = _raw(outcome, slo_s, threshold, took_s)
    piece = Piece(
        "sim",
        "One simulation",
        f"Profile {profile.name} ({profile.source}), {args.load} load, {args.requests} requests on {args.servers}.",
        args.seed,
        [Table("TTFT and what else clients saw", (*HEADS, "took s"), rows)],
        [Figure("seconds per million simulated requests", 1e6 * took_s / args.requests)],
        data=data,
    )
    piece.leave(args.out, "benchmark.sim", argv, every=True)
    return 0


def _raw(outcome: Outcome, slo_s: float | None, threshold: int, took_s: float) -> dict[str, Any]:
    groups = outcome.groups(threshold, slo_s, warm=0.05)
    return {
        "requests_per_s": outcome.rate,
        "prefill_tokens_per_s": outcome.tokens_rate,
        "utilisation": outcome.utilisation,
        "cached_share": cached_share(outcome),
        "batches": outcome.batches,
        "replayed": outcome.replayed,
        "moves": outcome.moves,
        "groups": {k: asdict(g) for k, g in groups.items()},
        "wall_s": took_s,
    }


if __name__ == "__main__":
    sys.exit(main())
