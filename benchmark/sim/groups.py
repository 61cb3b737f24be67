"""Data-parallel attention ranks: LAPS's joint plan against SGLang's policies on each rank, in the simulator.

python -m benchmark.sim.groups                          all workloads at 70%, each policy with each chunk
python -m benchmark.sim.groups --load 0.85 --quick      against the stock policy that was best before
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterable
from functools import cache
from itertools import product
from typing import Any

import numpy as np
from laps_plan.profile import Profile
from laps_plan.sim.engine import Events, simulate
from laps_plan.sim.fleet import Single
from laps_plan.sim.group import Assign, AssignRule, GroupServer, Ranks
from laps_plan.sim.metrics import RANK_CHUNK, Outcome, lone_s
from laps_plan.sim.variants import Variant
from laps_plan.traffic import traces, turns
from laps_plan.traffic.job import THRESHOLD, Job
from laps_plan.traffic.streams import Stream, Trace, poisson

from benchmark.results import Command, Figure, Parser, Piece, Table, count, positive

LONGEST = 131_072
"""Prompts are cut to the model's context (tokens)."""
CHUNKS = (512, 1024, 2048, 4096, 8192)
"""Chunks of a rank that stock is tried with (tokens)."""
POLICIES = ("fcfs", "hrrn", "shortest-prefill-first")
ASSIGNS: tuple[AssignRule, ...] = ("total_tokens", "random")
DELAYS = (3, 30)
"""Passes of the prefill delayer that the best stock policy is tried with."""
SPAN_S = {"mix": 200.0, "agents": 2400.0}
"""Length of a simulation (seconds); of the other workloads each seed has a third of the trace."""
CAPACITY = {"mix": 166.0, "azure_conv": 44.0, "mooncake_synthetic": 3.4, "agents": 1.9}
"""Requests/s that fcfs with its best chunk serves in saturation, 8 ranks of DeepSeek-V3: what loads are shares of."""
BEST = {"mix": 1024, "azure_conv": 2048, "mooncake_synthetic": 4096, "agents": 4096}
"""The chunk with which shortest-prefill-first and total_tokens were the best of stock at 70%."""
THINK_S, TOKEN_S = 30.0, 0.02
"""Seconds of agents: longest pause, and a token of output."""
JUDGED = 0.7
"""Load at which each figure has a bar."""
SHARED = ("short P90", "long P90", "mean TTFT", "slowdown", "tokens/s", "longest")
WAITING = "waiting"
"""Share of rank-time spent on waiting for the slowest rank (0..1)."""
BARS = {
    "mix": (0.62, 1.0, 0.64, 0.60), "azure_conv": (0.45, 1.0, 0.74, 0.60),
    "mooncake_synthetic": (0.10, 1.0, 0.35, 0.12), "agents": (0.30, 1.0, 0.50, 0.30),
}  # fmt: skip
"""At 70%: short P90, long P90, mean TTFT, mean slowdown, each over the best of stock."""
LAPS: dict[str, dict[str, Any]] = {
    "LAPS, whole steps": {"variant": Variant(laps={"slice_ms": 0.0})},
    "LAPS": {"variant": Variant()},
    "LAPS, whole steps, overlap loop": {"variant": Variant(laps={"slice_ms": 0.0}), "overlap": True},
}
Found = dict[str, Any]
"""One policy on all seeds together: "label", and by name what SHARED and WAITING say; times in seconds."""


@cache
def rows(name: str) -> list[Job]:
    """Return a trace, its prompts cut to LONGEST."""
    cut = [(row.at_s, min(LONGEST, row.new), row.cached) for row in traces.read(name)]
    return [Job(at, new, min(LONGEST - new, cached)) for at, new, cached in cut]


def mix(rate: float, span_s: float, rng: random.Random) -> list[Job]:
    """Return jobs with the lengths of LMSYS, and 5% of 1,024 to 8,192 tokens, at Poisson times."""
    lengths = [row.new for row in rows("lmsys_lengths")]
    times = poisson(rate, span_s, rng)
    return [Job(at, rng.randint(1024, 8192) if rng.random() < 0.05 else rng.choice(lengths)) for at in times]


def load(name: str, rate: float, seed: int) -> Stream:
    """Return a workload at ``rate`` requests per second. ``agents``: eleven turns around a random one of a session."""
    rng = random.Random(f"{name}/{seed}")
    if name == "mix":
        return Trace(mix(rate, SPAN_S[name], rng))
    if name == "agents":
        sessions = turns.agents(LONGEST, THINK_S, TOKEN_S)
        return Trace(turns.jobs(turns.stretches(sessions, 11, rate, SPAN_S[name], rng)))
    third = len(rows(name)) // 3
    part = rows(name)[seed % 3 * third :][:third]
    stretch = third / rate / (part[-1].at_s - part[0].at_s)
    return Trace([Job((row.at_s - part[0].at_s) * stretch, row.new, row.cached) for row in part])


def play(
    profile: Profile,
    stream: Stream,
    variant: Variant,
    chunk: int = RANK_CHUNK,
    assign: AssignRule = "total_tokens",
    seed: int = 0,
    *,
    overlap: bool = False,
) -> tuple[Outcome, GroupServer, Ranks]:
    """Simulate one load on the ranks of a profile. ``chunk``: of a rank (tokens)."""
    events, devices = Events(), Ranks(profile)
    ranks = profile.group.ranks if profile.group else 1
    policy = variant.ranks(profile, ranks * chunk, {})
    server = GroupServer("group", policy, devices, events, Assign(ranks, assign, seed), overlap=overlap)
    return simulate(stream, Single([server]), events), server, devices


def study(label: str, profile: Profile, name: str, rate: float, seeds: int, **how: Any) -> Found:
    """Return the figures of one policy. ``how``: as for ``play``."""
    played = [play(profile, load(name, rate, seed), seed=seed, **how) for seed in range(seeds)]
    t, n, old = (
        np.concatenate([np.array(getattr(o.record, column), dtype=float) for o, _, _ in played])
        for column in ("ttft", "new", "cached")
    )
    short, slow = n <= THRESHOLD, t / lone_s(profile, n, old, None)
    tokens = n.sum() / sum(o.seconds for o, _, _ in played)
    values = np.percentile(t[short], 90), np.percentile(t[~short], 90), t.mean(), slow.mean(), tokens, t.max()
    waiting = sum(d.waited_s for _, _, d in played) / sum(s.busy_s for _, s, _ in played)
    return {"label": label, **dict(zip(SHARED, map(float, values), strict=True)), WAITING: waiting}


def stock(profile: Profile, name: str, rate: float, args: argparse.Namespace) -> list[Found]:
    """Return the stock policies; the best of them, by its mean TTFT, is first."""
    tried: list[tuple[str, int, AssignRule]] = [(POLICIES[2], BEST[name], ASSIGNS[0])]
    if not args.quick:
        tried = list(product(POLICIES, CHUNKS, ASSIGNS))

    def run(policy: str, chunk: int, assign: AssignRule, passes: int = 0) -> Found:
        label = f"{policy}, {chunk}, {assign}" + (f", delayer {passes}" if passes else "")
        variant = Variant(policy, passes=passes)
        return study(label, profile, name, rate, args.seeds, variant=variant, chunk=chunk, assign=assign)

    found = [(run(*one), one) for one in tried]
    _, best = min(found, key=lambda pair: pair[0]["mean TTFT"])
    delayed = [run(*best, n) for n in (() if args.quick else DELAYS)]
    return sorted([*(one for one, _ in found), *delayed], key=lambda one: float(one["mean TTFT"]))


def judged(name: str, share: float, best: Found, laps: Found) -> Iterable[Figure]:
    """Yield the figures of a workload, LAPS over the best of stock."""
    most = dict(zip(SHARED, BARS[name], strict=False)) if share == JUDGED else {"longest": 0.5}
    for figure in SHARED:
        ratio = laps[figure] / best[figure]
        bar, met = (">= 1.0", ratio >= 0.995) if figure == "tokens/s" else ("", None)
        if figure in most:
            bar, met = f"<= {most[figure]:g}", round(ratio, 2) <= most[figure]
        yield Figure(f"{name}, {share:.0%}: {figure}", ratio, bar, met)


def cells(found: Found) -> list[str]:
    """Return the row of a policy."""
    label, *values = found.values()
    return [label, *(f"{v:.0f}" if v > 999 else f"{v:.3f}" for v in values)]


def options(p: Parser) -> None:
    """Add the options of this command."""
    p.add_argument("--workloads", nargs="+", choices=list(BARS), default=list(BARS))
    p.add_argument("--load", type=positive, default=JUDGED, help="share of what fcfs can do (0.7)")
    p.add_argument("--seeds", type=count, default=3)
    p.add_argument("--profile", default="h200-deepseek-v3-dp8")
    p.add_argument("--quick", action="store_true", help="only the stock policy that was the best before")
    p.add_argument("--only", nargs="+", choices=list(LAPS), default=list(LAPS), help="settings of LAPS")


def run(args: argparse.Namespace) -> Piece:
    """Simulate all workloads."""
    profile = Profile.load(args.profile)
    text = f"Profile {profile.name} ({profile.source}), {args.load:.0%} of what fcfs can do, {args.seeds} seeds."
    piece = Piece("sim-groups", "Data-parallel attention ranks, simulated", text, args.seed)
    for name in args.workloads:
        rate = args.load * CAPACITY[name]
        found = stock(profile, name, rate, args)
        best = found[0]
        for label in args.only:
            found.append(study(label, profile, name, rate, args.seeds, **LAPS[label]))
            args.say("  ".join(cells(found[-1])))
            if label == "LAPS":
                piece.figures += judged(name, args.load, best, found[-1])
        heads = ("", *SHARED, WAITING)
        piece.tables.append(Table(f"{name}: {rate:.3g} requests/s (s)", heads, [cells(f) for f in found]))
        piece.data[name] = found
    return piece


COMMAND = Command("benchmark.sim.groups", __doc__, run, options, out="sim-groups", seed=0)

if __name__ == "__main__":
    sys.exit(COMMAND.main())
