"""Data-parallel attention ranks: LAPS's joint plan against SGLang's policies on each rank, in the simulator.

python -m benchmark.sim.groups                          all workloads at 70%, each policy with each chunk
python -m benchmark.sim.groups --load 0.85 --quick      against the stock policy that was best before
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, astuple, dataclass
from functools import cache

import numpy as np
from laps_plan.profile import Profile
from laps_plan.sim.engine import Events, simulate
from laps_plan.sim.fleet import Single
from laps_plan.sim.group import Assign, AssignRule, GroupServer, Ranks
from laps_plan.sim.metrics import RANK_CHUNK, Floats, Outcome, lone_s
from laps_plan.sim.variants import Variant
from laps_plan.traffic import traces, turns
from laps_plan.traffic.job import THRESHOLD, Job
from laps_plan.traffic.streams import Stream, Trace, poisson

from benchmark.results.piece import Figure, Piece, Table, count, parser, positive

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
SHARED = ("short P90", "long P90", "mean TTFT", "slowdown", "tokens/s", "longest")
BARS = {
    "mix": (0.62, 1.0, 0.64, 0.60), "azure_conv": (0.45, 1.0, 0.74, 0.60),
    "mooncake_synthetic": (0.10, 1.0, 0.35, 0.12), "agents": (0.30, 1.0, 0.50, 0.30),
}  # fmt: skip
"""At 70%: short P90, long P90, mean TTFT, mean slowdown, each over the best of stock."""


@cache
def rows(name: str) -> list[Job]:
    """A trace, its prompts cut to LONGEST."""
    cut = [(row.at_s, min(LONGEST, row.new), row.cached) for row in traces.read(name)]
    return [Job(at, new, min(LONGEST - new, cached)) for at, new, cached in cut]


def mix(rate: float, span_s: float, rng: random.Random) -> list[Job]:
    """Jobs with the lengths of LMSYS, and 5% of 1,024 to 8,192 tokens, at Poisson times."""
    lengths = [row.new for row in rows("lmsys_lengths")]
    times = poisson(rate, span_s, rng)
    return [Job(at, rng.randint(1024, 8192) if rng.random() < 0.05 else rng.choice(lengths)) for at in times]


def load(name: str, rate: float, seed: int) -> Stream:
    """A workload at ``rate`` requests per second. ``mix``: lengths of LMSYS and 5% of 1,024 to 8,192 tokens;
    ``agents``: eleven turns around a random one of a session."""
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


@dataclass
class Found:
    """One policy on all seeds together. Times in seconds."""

    label: str
    short_p90: float
    long_p90: float
    mean: float
    slowdown: float
    """Mean of TTFT over TTFT alone."""
    tokens: float
    """New tokens per second."""
    longest: float
    """Longest TTFT."""
    waiting: float
    """Share of rank-time spent on waiting for the slowest rank (0..1)."""

    def row(self) -> list[str]:
        """Cells of the table."""
        label, *values = astuple(self)
        return [label, *(f"{v:.0f}" if v > 999 else f"{v:.3f}" for v in values)]


@dataclass
class Study:
    """One workload at one load."""

    profile: Profile
    name: str
    rate: float
    seeds: int

    def run(
        self, label: str, variant: Variant, chunk: int = RANK_CHUNK, assign: AssignRule = "total_tokens",
        overlap: bool = False,
    ) -> Found:  # fmt: skip
        """``chunk``: of a rank (tokens)."""
        columns: dict[str, list[Floats]] = {"ttft": [], "new": [], "cached": []}
        seconds = busy = waited = 0.0
        for seed in range(self.seeds):
            stream = load(self.name, self.rate, seed)
            outcome, server, devices = play(self.profile, stream, variant, chunk, assign, seed, overlap=overlap)
            for column, found in columns.items():
                found.append(np.array(getattr(outcome.record, column), dtype=float))
            seconds, busy, waited = seconds + outcome.seconds, busy + server.busy_s, waited + devices.waited_s
        t, n, old = (np.concatenate(c) for c in columns.values())
        short = n <= THRESHOLD
        slow = t / lone_s(self.profile, n, old, None)
        values = (
            np.percentile(t[short], 90), np.percentile(t[~short], 90), t.mean(), slow.mean(), n.sum() / seconds,
            t.max(), waited / busy,
        )  # fmt: skip
        return Found(label, *map(float, values))

    def stock(self, quick: bool) -> list[Found]:
        """The stock policies; the best of them, by its mean TTFT, is first."""
        tried: list[tuple[str, int, AssignRule]] = [("shortest-prefill-first", BEST[self.name], "total_tokens")]
        if not quick:
            tried = [(p, c, a) for p in POLICIES for c in CHUNKS for a in ASSIGNS]
        found = [(self.run(f"{p}, {c}, {a}", Variant(p), c, a), p, c, a) for p, c, a in tried]
        found.sort(key=lambda one: one[0].mean)
        _, policy, chunk, assign = found[0]
        delayed = [
            self.run(f"{policy}, {chunk}, {assign}, delayer {n}", Variant(policy, passes=n), chunk, assign)
            for n in (() if quick else DELAYS)
        ]
        return sorted([f for f, *_ in found] + delayed, key=lambda one: one.mean)


LAPS: dict[str, tuple[Variant, bool]] = {
    "LAPS, whole steps": (Variant(laps={"slice_ms": 0.0}), False),
    "LAPS": (Variant(), False),
    "LAPS, whole steps, overlap loop": (Variant(laps={"slice_ms": 0.0}), True),
}


def judged(name: str, share: float, best: Found, laps: Found) -> Iterable[Figure]:
    """The figures of a workload, LAPS over the best of stock."""
    ours, theirs = astuple(laps)[1:], astuple(best)[1:]
    ratios = dict(zip(SHARED, (a / b for a, b in zip(ours, theirs, strict=True)), strict=False))
    most = dict(zip(SHARED, BARS[name], strict=False)) if share == 0.7 else {"longest": 0.5}
    for figure, ratio in ratios.items():
        bar, met = (">= 1.0", ratio >= 0.995) if figure == "tokens/s" else ("", None)
        if figure in most:
            bar, met = f"<= {most[figure]:g}", round(ratio, 2) <= most[figure]
        yield Figure(f"{name}, {share:.0%}: {figure}", ratio, bar, met)


def main(argv: Sequence[str] | None = None) -> int:
    p = parser("python -m benchmark.sim.groups", __doc__, "sim-groups", seed=0, whole=True)
    p.add_argument("--profile", default="h200-deepseek-v3-dp8")
    p.add_argument("--workloads", nargs="+", choices=list(CAPACITY), default=list(CAPACITY))
    p.add_argument("--load", type=positive, default=0.7, help="share of what fcfs can do (0.7)")
    p.add_argument("--seeds", type=count, default=3)
    p.add_argument("--quick", action="store_true", help="of stock only what was best before")
    p.add_argument("--only", nargs="+", choices=list(LAPS), default=list(LAPS))
    args = p.parse_args(argv)
    profile = Profile.load(args.profile)
    text = f"Profile {profile.name} ({profile.source}), {args.load:.0%} of what fcfs can do, {args.seeds} seeds."
    piece = Piece("sim-groups", "Data-parallel attention ranks, simulated", text, args.seed)

    def tell(found: Found) -> None:
        print(*found.row(), sep="  ", flush=True)

    for name in args.workloads:
        study = Study(profile, name, args.load * CAPACITY[name], args.seeds)
        found = study.stock(args.quick)
        best = found[0]
        tell(best)
        for label in args.only:
            variant, overlap = LAPS[label]
            found.append(study.run(label, variant, overlap=overlap))
            tell(found[-1])
            if label == "LAPS":
                piece.figures += judged(name, args.load, best, found[-1])
        heads = ("", *SHARED, "waiting")
        piece.tables.append(Table(f"{name}: {study.rate:.3g} requests/s (s)", heads, [f.row() for f in found]))
        piece.data[name] = [asdict(f) for f in found]
    piece.leave(args.out, "benchmark.sim.groups", argv)
    return 0


if __name__ == "__main__":
    sys.exit(main())
