"""Effects of each knob, scaling, and bounds under overload, in the simulator.

python -m benchmark.sim.ablation
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from laps_core.config import LapsConfig
from laps_core.latency.step import StepShape
from laps_core.pools.config import AllocConfig
from laps_core.scheduling.gap import SAVED, stretch
from laps_plan.profile import Profile
from laps_plan.sim.metrics import Outcome
from laps_plan.sim.variants import VARIANTS, run
from laps_plan.traffic.job import Job
from laps_plan.traffic.lengths import Sizes, lmsys, log_uniform, mix, uniform
from laps_plan.traffic.streams import Closed, Open, Sessions, Stream, Trace, poisson

from benchmark.results.piece import Piece, parser
from benchmark.sim.study import Study

SHARE, SHORT, LONG = 0.05, lmsys(256), log_uniform(1024, 8192)
CHUNK = 8192
SCALE = {1: 60.0, 2: 60.0, 4: 60.0, 8: 60.0, 16: 60.0, 64: 30.0, 250: 8.0, 1000: 3.0}
"""Instances -> simulated seconds."""
FRONTS = (
    ("fcfs, least-load", "fcfs", "least-load", AllocConfig()),
    ("laps, least-load", "laps", "least-load", AllocConfig()),
    ("laps, pools", "laps", "pools", AllocConfig()),
    ("laps, pools, no long spill", "laps", "pools", AllocConfig(spill="short")),
)
"""Label, scheduler, router and its configuration."""
OVERLOAD, OVERLOAD_S = 1.2, 400.0
"""Load over capacity, and its duration, longer than the promised wait (ratio, seconds)."""
LONG_LOAD = 0.02
"""Share of the device's capacity that long work asks for under overload: less than the gap leaves it (0..1)."""


@dataclass(kw_only=True)
class Ablation(Study):
    """The study on one profile."""

    profile: Profile
    capacity: float = 0.0
    """Requests/s of the mix that stock fcfs serves with 256 clients."""

    def load(self, utilisation: float) -> Open:
        """The mix, open, at a share of that capacity."""
        return Open(sizes(), utilisation * self.capacity, self.requests, self.seed)

    def run(self, name: str, load: Stream, **how: Any) -> Outcome:
        """Simulate one variant."""
        return run(VARIANTS[name], load, self.profile, chunk=CHUNK, **how)


def sizes() -> Sizes:
    """The mix: LMSYS lengths up to 256, and 5% of 1,024 to 8,192 tokens."""
    return mix(SHORT, LONG, SHARE)


HEADS = ("short P50", "short P90", "short P99", "long P50", "long P90", "longest long wait s", "req/s")


def cells(o: Outcome) -> tuple[str, ...]:
    """Return the columns of HEADS; short is up to 256 computed tokens, whatever the variant thinks."""
    groups = o.groups(256, warm=0.05)
    wanted = (("short", "p50"), ("short", "p90"), ("short", "p99"), ("long", "p50"), ("long", "p90"))
    ttft = (f"{1e3 * groups[k].ttft[q]:.1f}" if groups[k].requests else "-" for k, q in wanted)
    return (*ttft, f"{groups['long'].longest_wait:.2f}", f"{o.rate:.1f}")


def knobs(r: Ablation) -> None:
    """One knob at a time."""
    questions: tuple[tuple[str, str, Sequence[Any], float], ...] = (
        ("Threshold (tokens)", "length_threshold", (32, 64, 128, 256, 512, 1024, 2048, 4096, "auto"), 0.7),
        ("Guard: share of long time for the oldest", "guard", (0.0, 0.1, 0.25, 0.5, 1.0), 0.9),
        ("Preemption: share of the device", "preempt_overhead", (0.02, 0.05, 0.1, 0.15, 0.3, 0.6, 1.0), 0.9),
        ("Slice (ms; 0: whole batches)", "slice_ms", (0.0, 2.0, 4.0, 8.0, 16.0, 32.0), 0.9),
        ("Order, SLO 400 ms", "order", ("least-work", "fcfs", "edf", "lars", "s-edf"), 0.9),
    )
    for title, name, values, utilisation in questions:
        rows: list[Sequence[str]] = []
        seen = {}
        more = {"ttft_slo_ms": 400.0} if name == "order" else {}
        for value in values:
            o = r.run("laps", r.load(utilisation), knobs={name: value, **more})
            rows.append((str(value), *cells(o)))
            groups = o.groups(256, warm=0.05)
            seen[str(value)] = {
                k: {"requests": g.requests, **g.ttft, "longest_wait": g.longest_wait, "slowdown": g.slowdown}
                for k, g in groups.items()
            }
        rows.append(("stock fcfs", *cells(r.run("fcfs", r.load(utilisation)))))
        r.table(f"{title}, open load at {utilisation:.0%} of capacity", ("", *HEADS), rows)
        r.piece.data[name] = seen


def overhead_closed(r: Ablation) -> None:
    """Preemption where clients wait for answers: those with long prompts pile up, and shorts run in small batches."""
    rows: list[Sequence[str]] = []
    for name, variant, more in (
        ("stock fcfs", "fcfs", {}),
        *((f"overhead {x:g}", "laps", {"preempt_overhead": x}) for x in (0.02, 0.05, 0.15, 0.3, 1.0)),
        *((f"guard {x:g}", "laps", {"guard": x}) for x in (0.0, 0.5, 1.0)),
    ):
        o = r.run(variant, Closed(sizes(), 64, r.requests // 2, r.seed), knobs=more)
        rows.append((name, *cells(o), f"{o.batches / len(o.record):.2f}"))
    r.table("Preemption and guard, 64 clients in a closed loop", ("", *HEADS, "steps/request"), rows)
    r.piece.data["overhead closed"] = rows


def window(r: Ablation) -> None:
    """The window in a closed loop of short requests, and where arrivals are independent."""
    widths = (0.0, 1.0, 2.0, 5.0, 10.0, 20.0)
    loads: dict[str, Callable[[], Stream]] = {
        "closed, 8 clients": lambda: Closed(SHORT, 8, r.requests, r.seed),
        "closed, 64 clients": lambda: Closed(SHORT, 64, r.requests, r.seed),
        "open, 70%": lambda: r.load(0.7),
    }
    seen: dict[str, list[tuple[float, float]]] = {}
    for name, load in loads.items():
        for kind in ("awd", "fixed"):
            for w in widths:
                o = r.run("laps", load(), knobs={"window": kind, "wait_window_ms": w})
                seen.setdefault(f"{name}, {kind}", []).append((o.rate, o.groups()["short"].ttft["mean"]))
    rows = [(name, *(f"{rate:.0f} / {1e3 * mean:.1f}" for rate, mean in points)) for name, points in seen.items()]
    r.table("Window (ms): requests/s / mean short TTFT (ms)", ("", *(f"{w:g}" for w in widths)), rows)
    r.piece.data["window"] = seen


def basis(r: Ablation) -> None:
    """Conversations with growing history: class by uncached tokens or by the whole prompt."""
    rows: list[Sequence[str]] = []
    p90 = {}
    for name, variant, more in (
        ("stock fcfs", "fcfs", {}),
        ("LAPS, uncached", "laps", {"length_basis": "uncached"}),
        ("LAPS, prompt", "laps", {"length_basis": "prompt"}),
    ):
        turns = Sessions(mix(uniform(50, 600), LONG, 0.2), 300, r.requests, r.seed, think_s=6.0)
        o = r.run(variant, turns, knobs=more)
        rows.append((name, *cells(o)))
        p90[name] = o.groups(warm=0.05)["short"].ttft["p90"]
    r.table("Length basis: 300 users in conversations of 5 turns", ("", *HEADS), rows)
    over = p90["LAPS, uncached"] / p90["LAPS, prompt"]
    r.judge("short P90, class by uncached tokens / by prompt", over, "<= 1", over <= 1.0)


def scale(r: Ablation) -> None:
    """1 to 1,000 instances at the same load each."""
    rows: list[Sequence[str]] = []
    y: dict[str, list[float]] = {}
    for n, span_s in SCALE.items():
        rate = 0.7 * r.capacity * n
        requests = round(rate * span_s)
        for label, name, router, alloc in FRONTS:
            if n == 1 and router == "pools":
                continue
            begin = time.perf_counter()
            o = r.run(name, Open(sizes(), rate, requests, r.seed), servers=n, router=router, alloc=alloc)
            took = time.perf_counter() - begin
            groups = o.groups(256, warm=0.3)
            rows.append((
                str(n), f"{span_s:g}", label, *(f"{1e3 * groups[k].ttft['p90']:.1f}" for k in ("short", "long")),
                f"{o.utilisation:.2f}", str(len(o.moves)), f"{1e6 * took / requests:.0f}",
            ))  # fmt: skip
            y.setdefault(label, []).append(1e3 * groups["short"].ttft["p90"])
    heads = ("instances", "simulated s", "", "short P90 ms", "long P90 ms", "busy", "moves", "simulation us/request")
    r.table(
        "Scale, open load at 70% of capacity", heads, rows,
        "Without the first 30% of the time. Pools start as halves and move one instance per 5 s at most. The "
        "simulation's cost per request includes the router's own choice, which looks at every instance.",
    )  # fmt: skip
    for label, _, router, _ in FRONTS:
        if router == "pools":
            y[label].insert(0, float("nan"))
    caption = "Short P90 TTFT from 1 to 1,000 instances (simulated)."
    r.picture("scale.svg", caption, list(SCALE), {"short P90 TTFT (ms)": y}, "instances", log_y=True)
    r.piece.data["scale"] = rows


# -- overload


def both_classes(short_rate: float, long_rate: float, span_s: float, seed: int) -> list[Job]:
    """Poisson arrivals of both classes at given rates (1/s) over a given time (seconds)."""
    rng = random.Random(seed)
    jobs = [
        Job(at, size(rng))
        for rate, size in ((short_rate, SHORT), (long_rate, LONG))
        for at in poisson(rate, span_s, rng)
    ]
    return sorted(jobs, key=lambda job: (job.at_s, job.new))


def promised_wait_s(profile: Profile, rows: Sequence[Job], config: LapsConfig) -> float:
    """Longest time from a long request's arrival to its first token that gap and guard allow (seconds).

    Gap: long work takes ``stretch`` times as long while short batches wait always. Guard: of that, a request has its
    first token after at most (A + 2 B) / share, with B the longest long batch and A the batches of the requests that
    came before it and were not done, and its own (see laps_core/scheduling/gap.py, guard.py).
    """
    c = profile.coefficients
    host = profile.step_host_s + profile.poll_s
    mean_short = statistics.mean(r.new for r in rows if r.new <= 256)
    whole = c.linear * CHUNK + c.step_s + host
    short = whole + c.per_request * CHUNK / mean_short
    long = whole + c.alpha * CHUNK * CHUNK + c.per_request * CHUNK / 257
    gap = (c.step_s + c.per_request) / config.preempt_overhead
    stretched = long / config.guard * stretch(gap, short)
    free = longest = 0.0
    for row in rows:
        if row.new > 256:
            free = max(free, row.at_s) + -(-row.new // CHUNK) * stretched
            longest = max(longest, free - row.at_s)
    return longest + 2.0 * stretched + stretch(gap, short) * gap + (SAVED - 1) * short


def overload(r: Ablation) -> None:
    """120% of capacity: what the long class waits."""
    rng = random.Random(r.seed)
    long_s = statistics.mean(_alone_s(r.profile, LONG(rng)) for _ in range(4000))
    long_rate = LONG_LOAD / long_s
    mean_short = statistics.mean(SHORT(rng) for _ in range(4000))
    c = r.profile.coefficients
    batch = CHUNK / mean_short
    short_s = c.linear * mean_short + c.per_request + (c.step_s + r.profile.step_host_s + r.profile.poll_s) / batch
    short_rate = (OVERLOAD - LONG_LOAD) / short_s
    rows = both_classes(short_rate, long_rate, OVERLOAD_S, r.seed)
    bound = promised_wait_s(r.profile, rows, LapsConfig())
    table: list[Sequence[str]] = []
    longest = {}
    for name in ("fcfs", "hrrn", "shortest-prefill-first", "dual", "laps"):
        o = r.run(name, Trace(rows), until_s=OVERLOAD_S)
        groups = o.groups(256)
        # Those that still wait at the end have waited at least since they came.
        answered = {at for at, new in zip(o.record.at, o.record.new, strict=True) if new > 256}
        left = [OVERLOAD_S - row.at_s for row in rows if row.new > 256 and row.at_s not in answered]
        longest[name] = max([groups["long"].longest_wait, *left])
        table.append((
            name, f"{1e3 * groups['short'].ttft['p90']:.0f}", f"{longest[name]:.1f}", str(len(left)), f"{o.rate:.0f}",
            f"{o.utilisation:.2f}",
        ))  # fmt: skip
    r.table(
        f"Overload: {OVERLOAD:.0%} of the device for {OVERLOAD_S:g} s, long work {LONG_LOAD:.0%} of it",
        ("", "short P90 ms", "longest long wait s", "long unanswered", "req/s", "busy"), table,
        f"Gap and guard promise the long class waits of at most {bound:.1f} s here.",
    )  # fmt: skip
    mine, other = longest["laps"], longest["shortest-prefill-first"]
    r.judge("longest long wait under overload, LAPS (s)", mine, f"<= {bound:.1f}: gap and guard", mine <= bound)
    r.judge("the same, shortest-prefill-first (s)", other, f"> {bound:.1f}: not bounded", other > bound)
    r.piece.data["overload"] = {"longest_long_wait_s": longest, "promised_s": bound, "rates": [short_rate, long_rate]}


def _alone_s(profile: Profile, tokens: int) -> float:
    step_s = profile.coefficients.seconds(StepShape.of([(tokens, 0)]))
    return step_s + profile.step_host_s + profile.poll_s


QUESTIONS: Mapping[str, Callable[[Ablation], None]] = {
    "knobs": knobs, "overhead": overhead_closed, "window": window, "basis": basis, "scale": scale, "overload": overload,
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    p = parser("python -m benchmark.sim.ablation", __doc__, "ablation", seed=0, whole=True)
    p.add_argument("--profile", default="h200-qwen3-8b")
    p.add_argument("--requests", type=int, default=20_000, help="per point; more where instances are many")
    p.add_argument("--only", nargs="+", choices=list(QUESTIONS), default=list(QUESTIONS))
    args = p.parse_args(argv)
    piece = Piece("ablation", "Knobs, scale and overload, simulated", "", args.seed)
    r = Ablation(args.requests, args.seed, args.out, piece, profile=Profile.load(args.profile))
    r.capacity = r.run("fcfs", Closed(sizes(), 256, args.requests, args.seed)).rate
    piece.text = (
        f"Profile {r.profile.name} ({r.profile.source}). LMSYS lengths up to 256 tokens and {SHARE:.0%} of 1,024 to "
        f"8,192; capacity: {r.capacity:.0f} requests/s, what stock fcfs serves 256 clients in a closed loop."
    )
    for name in args.only:
        QUESTIONS[name](r)
    piece.leave(args.out, "benchmark.sim.ablation", argv, every=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
