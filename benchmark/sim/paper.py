"""The paper's tables again, in the simulator: H200, Qwen3, kernels as NVIDIA measured them, host times assumed.

    python -m benchmark.sim.paper

"vanilla" is stock fcfs without prefill graphs, what the paper compared with; "graphs only" adds the graphs, "dual queue
only" the two queues without the window, "full" is LAPS. SGLang 0.5.23 with its own prefill graphs stands beside them.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from laps_plan.profile import Profile
from laps_plan.sim.variants import VARIANTS, run
from laps_plan.traffic.lengths import Sizes, fixed, lmsys, log_uniform, mix
from laps_plan.traffic.streams import Closed, Jobs, Open, Stream, populations

from benchmark.results.piece import Figure, Piece, Table, parser
from benchmark.sim.study import SLO_S, Point, Study
from benchmark.suites.claims import percent

MODELS = ("8b", "32b")
PATHS: dict[str, dict[str, Any]] = {
    "vanilla": {"path": "eager-fcfs"},
    "graphs only": {"path": "eager-fcfs-graphs"},
    "dual queue only": {"path": "eager-dual"},
    "full": {"path": "eager-laps-graphs"},
    "0.5.23 fcfs": {"path": "fcfs"},
    "0.5.23 LAPS": {"path": "laps-graphs"},
}
"""Variants that are compared with one instance."""
PLAIN, ROUTER = "plain data parallel", "SGLang router"
FLEETS: dict[str, dict[str, Any]] = {
    PLAIN: {"path": "eager-fcfs", "router": "round-robin"},
    ROUTER: {"path": "eager-fcfs", "router": "least-load"},
    "LAPS": {"path": "eager-laps-graphs", "router": "pools"},
}
"""With several."""
CLIENTS = (1, 2, 4, 8, 16, 32, 64)
MANY = range(5, 7)
"""Places in CLIENTS: from 32 on they are called many."""
LONG_SHARE, LONG_TOKENS = 0.05, (1024, 8192)


def sizes() -> Sizes:
    """A composite: LMSYS lengths, 5% of the requests replaced by 1,024 to 8,192 tokens."""
    return mix(lmsys(), log_uniform(*LONG_TOKENS), LONG_SHARE)


Seen = dict[str, list[Point]]
"""Variant -> a point for each load."""
Shown = Mapping[str, tuple[str, float]]
"""Label of a picture's y axis -> a figure of a point, and its factor."""
CELLS: dict[str, Callable[[Point], str]] = {
    "req/s": lambda p: f"{p.rate:.0f}",
    "mean ms": lambda p: f"{1e3 * p.mean:.0f}",
    "short P90": lambda p: f"{1e3 * p.short_p90:.0f}",
    "long P90": lambda p: f"{1e3 * p.long_p90:.0f}",
    "over 0.4 s": lambda p: f"{100 * p.over:.1f}%",
    "ms": lambda p: f"{1e3 * p.mean:.1f}",
}
"""Columns of a table -> what stands in them."""


def raw(seen: Seen) -> dict[str, Any]:
    """JSON-ready."""
    return {name: [vars(p) for p in points] for name, points in seen.items()}


@dataclass
class Paper(Study):
    """The study, and the claims it has looked at."""

    claims: list[Sequence[str]] = field(default_factory=list)
    """Rows: claim of the paper, result, whether it is reached, why."""
    reached: list[bool] = field(default_factory=list)

    def point(self, load: Stream, path: str, model: str = "8b", **how: Any) -> Point:
        """Simulate one variant."""
        return Point.of(run(VARIANTS[path], load, Profile.load(f"h200-qwen3-{model}"), seed=self.seed, **how))

    def sweep(
        self, ways: Mapping[str, Mapping[str, Any]], x: Sequence[Any], load: Callable[[Any], Stream], **how: Any
    ) -> Seen:
        """Every variant under every load."""
        return {name: [self.point(load(at), **way, **how) for at in x] for name, way in ways.items()}

    def grid(
        self, title: str, label: str, x: Sequence[object], seen: Seen, columns: Sequence[str], note: str = ""
    ) -> None:
        """A table with a row for each load and a group of columns for each figure."""
        heads = (label, *(f"{name} {c}" for c in columns for name in seen))
        rows = [(str(at), *(CELLS[c](p[i]) for c in columns for p in seen.values())) for i, at in enumerate(x)]
        self.table(title, heads, rows, note)

    def plot(
        self, name: str, caption: str, x: Sequence[float], label: str, seen: Seen, shown: Shown, **how: Any
    ) -> None:
        """A picture of some figures."""
        panels = {y: {n: [f * getattr(p, key) for p in ps] for n, ps in seen.items()} for y, (key, f) in shown.items()}
        self.picture(name, f"{caption} (simulated).", x, panels, label, **how)

    def claim(self, text: str, value: str, reached: bool | None, why: str) -> None:
        """Note a claim; ``reached`` None: not comparable."""
        told = {True: "reached", False: "not reached", None: "not comparable"}[reached]
        self.claims.append((text, value, told, why))
        if reached is not None:
            self.reached.append(bool(reached))


def single(r: Paper) -> None:
    """One instance, 1 to 64 clients in a closed loop."""
    found = {m: r.sweep(PATHS, CLIENTS, lambda c: Closed(sizes(), c, r.requests, r.seed), model=m) for m in MODELS}
    for model, seen in found.items():
        title = f"One instance, Qwen3-{model.upper()}: closed loop"
        r.grid(title, "clients", CLIENTS, seen, ("req/s", "mean ms", "short P90"))
    r.piece.data["single"] = {m: raw(seen) for m, seen in found.items()}
    by = found["8b"]
    shown = {"requests/s": ("rate", 1.0), "mean TTFT (ms)": ("mean", 1e3), "short P90 TTFT (ms)": ("short_p90", 1e3)}
    caption = "One H200 with Qwen3-8B: throughput and TTFT against concurrency"
    r.plot("single.svg", caption, CLIENTS, "clients", by, shown, log_y=True)

    def usual(figure: str, new: str, base: str) -> float:
        """Median ratio of a figure over all models and many clients."""
        return statistics.median(
            getattr(seen[new][i], figure) / getattr(seen[base][i], figure) for seen in found.values() for i in MANY
        )

    at, base = by["full"][-1], by["vanilla"][-1]
    shift = (
        f"of 8B at {CLIENTS[-1]} clients, short P90 went from {1e3 * base.short_p90:.0f} to {1e3 * at.short_p90:.0f} "
        f"ms, long from {1e3 * base.long_p90:.0f} to {1e3 * at.long_p90:.0f}"
    )
    for text, figure in (
        ("prefill latency -30% and more (mean TTFT, many clients)", "mean"),
        ("the same for short requests' P90", "short_p90"),
    ):
        change = usual(figure, "full", "vanilla")
        r.claim(text, percent(change), change <= 0.7, shift)
    for model, text, least, points in (
        ("8b", "up to +20% requests/s with 1 instance (best of 1 to 64 clients)", 1.2, range(len(CLIENTS))),
        ("32b", "+35% requests/s for 32B under high concurrency", 1.35, MANY),
    ):
        full, vanilla = found[model]["full"], found[model]["vanilla"]
        gains = {i: full[i].rate / vanilla[i].rate for i in points}
        best = max(gains, key=gains.__getitem__)
        f, v = full[best], vanilla[best]
        why = (
            f"at {CLIENTS[best]} clients vanilla was busy {v.busy:.0%} and spent {v.overhead:.0%} of that on the fixed "
            f"cost of steps, which is all that scheduling can save; full took {f.steps:.2f} steps a request instead of "
            f"{v.steps:.2f} and spent {f.overhead:.0%}"
        )
        value = f"{percent(gains[best])} (worst {percent(min(gains.values()))})"
        r.claim(text, value, gains[best] >= least, why)
    alone, after = usual("rate", "graphs only", "vanilla"), usual("rate", "full", "dual queue only")
    little = 1.05
    r.claim(
        "graphs alone bring little; the two queues make them pay (requests/s, many clients)",
        f"{percent(alone)} alone, {percent(after)} on top of the two queues", alone <= little < after,
        "a batch that holds a long prompt fits no graph; batches of short ones do",
    )  # fmt: skip


def same_rate(r: Paper) -> None:
    """One instance, the same requests/s for all: shares of what vanilla serves 64 clients in a closed loop."""
    capacity = r.point(Closed(sizes(), 64, r.requests, r.seed), "eager-fcfs").rate
    shares = (0.3, 0.5, 0.7, 0.8, 0.9)
    seen = r.sweep(PATHS, shares, lambda u: Open(sizes(), u * capacity, 5 * r.requests, r.seed))
    title, x = "One instance, Qwen3-8B: Poisson arrivals", [f"{u:.0%}" for u in shares]
    note = f"Capacity: {capacity:.0f} requests/s."
    r.grid(title, "of capacity", x, seen, ("mean ms", "short P90", "long P90"), note)
    r.piece.data["same rate"] = raw(seen)
    for base, mine in (("vanilla", "full"), ("0.5.23 fcfs", "0.5.23 LAPS")):
        changes = [f.mean / v.mean for f, v in zip(seen[mine], seen[base], strict=True)]
        best = min(range(len(shares)), key=changes.__getitem__)
        f, v = seen[mine][best], seen[base][best]
        r.claim(
            f"average latency -20% at the same requests/s ({mine} / {base}, median of loads)",
            percent(statistics.median(changes)), statistics.median(changes) <= 0.8,
            f"best {percent(changes[best])} at {shares[best]:.0%} of capacity: short P90 {1e3 * v.short_p90:.0f} "
            f"to {1e3 * f.short_p90:.0f} ms, long P90 {1e3 * v.long_p90:.0f} to {1e3 * f.long_p90:.0f} ms",
        )  # fmt: skip


def slo(r: Paper) -> None:
    """Violations of a TTFT of 0.4 s against concurrency, 1 and 8 instances."""
    for servers, clients in ((1, (4, 8, 16, 32, 64, 128)), (8, (32, 64, 128, 256, 512, 1024))):
        n = r.requests * servers // 2
        ways = {name: way for name, way in FLEETS.items() if servers > 1 or name != PLAIN}
        ways["LAPS"] = {**FLEETS["LAPS"], "knobs": {"ttft_slo_ms": 1e3 * SLO_S}}
        seen = r.sweep(ways, clients, lambda c, n=n: Closed(sizes(), c, n, r.seed), servers=servers)  # type: ignore[misc]
        title = f"TTFT over 0.4 s, Qwen3-8B, {servers} instance(s)"
        r.grid(title, "clients", clients, seen, ("over 0.4 s", "req/s"))
        caption = f"Requests above a TTFT of 0.4 s, {servers} instance(s)"
        r.plot(f"slo-{servers}.svg", caption, clients, "clients", seen, {"requests over 0.4 s (%)": ("over", 100.0)})
        r.piece.data[f"slo {servers}"] = raw(seen)
        _slo_claims(r, servers, clients, seen)


def _slo_claims(r: Paper, servers: int, clients: Sequence[int], seen: Seen) -> None:
    laps, router = seen["LAPS"], seen[ROUTER]
    best = max(range(len(clients)), key=lambda i: router[i].over - laps[i].over)
    gaps = [100 * (b.over - a.over) for a, b in zip(laps, router, strict=True)]
    gap, span = statistics.median(gaps), f"{min(gaps):+.0f} to {max(gaps):+.0f}"

    def told(i: int) -> str:
        parts = ", ".join(f"{n} {100 * ps[i].over:.1f}%" for n, ps in seen.items())
        long = f"long P90 {router[i].long_p90:.2f} s with the SGLang router, {laps[i].long_p90:.2f} with LAPS"
        return f"at {clients[i]} clients: {parts}; {long}"

    if servers == 1:
        r.claim(
            "1 instance, TTFT 0.4 s: violations 10 points below the SGLang router (median of loads)",
            f"{gap:+.0f} points ({span})", gap >= 10, told(best),
        )  # fmt: skip
        why = "one instance has nothing to be parallel with; it is the row above"
        r.claim("1 instance: 30 points below plain data parallel", "-", None, why)
        return
    # Where the router loses as many as it did in the paper.
    like = min(range(len(clients)), key=lambda i: abs(router[i].over - 0.047))
    r.claim(
        "8 instances: 0% of requests over 0.4 s against 4.7%", f"{laps[like].over:.1%} against {router[like].over:.1%}",
        laps[like].over <= 0.005 < router[like].over, told(like),
    )  # fmt: skip
    below = statistics.median(100 * (b.over - a.over) for a, b in zip(laps, seen[PLAIN], strict=True))
    r.claim(
        "8 instances: violations 28 points below plain data parallel, 12 below the router (median of loads)",
        f"{below:+.0f} and {gap:+.0f} points (router: {span})", below >= 28 and gap >= 12, told(best),
    )  # fmt: skip


def interference(r: Paper) -> None:
    """Compare how each class slows the other, in closed loops of both."""
    ways = {"vanilla": PATHS["vanilla"], "0.5.23 fcfs": PATHS["0.5.23 fcfs"], "full": PATHS["full"]}
    for kind, moving, clients in (
        ("long", "short", [(n, 2) for n in (0, 1, 4, 16, 64)]),
        ("short", "long", [(16, n) for n in (0, 1, 2, 4, 8)]),
    ):
        x = [short if moving == "short" else long for short, long in clients]
        seen = r.sweep(
            ways, clients, lambda c: populations([(lmsys(256), c[0]), (fixed(4096), c[1])], r.seed), until_s=30.0
        )
        title, figure = f"{kind} P90 TTFT (ms) with more {moving} clients", f"{kind}_p90"
        rows = [(str(n), *(f"{1e3 * getattr(p[i], figure):.0f}" for p in seen.values())) for i, n in enumerate(x)]
        r.table(title, (f"{moving} clients", *seen), rows, "8B; long: 4,096 tokens; closed loops.")
        r.piece.data[title] = raw(seen)
        label = f"{moving} clients (0 drawn at 0.5)"
        drawn = {f"{kind} P90 TTFT (ms)": (figure, 1e3)}
        r.plot(f"interference-{moving}.svg", title, [max(v, 0.5) for v in x], label, seen, drawn, log_y=True)
    worst = [seen[n][-1].short_p90 / seen[n][0].short_p90 for n in ("vanilla", "full")]
    r.claim(
        "long work hardly touches short requests once they have their own queue",
        f"{worst[0]:.1f}x without, {worst[1]:.1f}x with LAPS", worst[1] < 0.5 * worst[0],
        f"short P90 with {x[-1]} long clients over that with none",
    )  # fmt: skip


def window(r: Paper) -> None:
    """The waiting window's curve."""
    widths, clients = (0.0, 1.0, 2.0, 5.0, 10.0, 20.0), (4, 16, 64)
    seen: Seen = {}
    changes: dict[str, list[float]] = {"awd": [], "fixed": []}
    for kind, found in changes.items():
        for c in clients:
            points = seen[f"{kind}, {c} clients"] = [
                r.point(
                    Closed(lmsys(256), c, r.requests, r.seed), "eager-laps-graphs",
                    knobs={"window": kind, "wait_window_ms": w},
                )
                for w in widths
            ]  # fmt: skip
            found += [p.rate / points[0].rate for p in points]
    title, x = "Short requests only: the waiting window", [f"{w:g}" for w in widths]
    r.grid(title, "window ms", x, seen, ("req/s", "ms"), "8B; mean TTFT.")
    shown = {"requests/s": ("rate", 1.0), "mean TTFT (ms)": ("mean", 1e3)}
    caption = "Throughput and TTFT of short requests against the waiting window"
    r.plot("window.svg", caption, widths, "longest window (ms)", seen, shown, log_x=False)
    r.piece.data["window"] = raw(seen)
    best, worst, plain = max(changes["awd"]), min(changes["awd"]), min(changes["fixed"])
    r.claim(
        "waiting a few milliseconds buys throughput", f"{percent(best)} at best, {percent(worst)} at worst",
        best >= 1.05,
        f"a fixed window costs up to {percent(plain)}: at {clients[-1]} clients batches fill by themselves",
    )  # fmt: skip


def distillation(r: Paper) -> None:
    """Offline work without deadlines on 4 instances: how long until all is done."""
    ways = {**FLEETS, "LAPS schedulers, SGLang router": {**FLEETS["LAPS"], "router": "least-load"}}
    n, in_flight = 4 * r.requests, 256
    seen = {
        name: points[0]
        for name, points in r.sweep(ways, (in_flight,), lambda c: Jobs(sizes(), c, n, r.seed), servers=4).items()
    }
    base = seen[PLAIN]
    rows: list[Sequence[str]] = [
        (
            name, f"{p.seconds:.1f}", percent(p.seconds / base.seconds), f"{p.busy:.0%}", f"{p.steps:.2f}",
            f"{p.overhead:.0%}",
        )
        for name, p in seen.items()
    ]  # fmt: skip
    heads = ("", "seconds", "", "busy", "steps/request", "fixed cost of steps")
    r.table(f"{n} requests, {in_flight} in flight, 4 instances of 8B, no deadlines", heads, rows)
    r.piece.data["distillation"] = {name: vars(p) for name, p in seen.items()}
    ratio = seen["LAPS"].seconds / base.seconds
    best = min(seen, key=lambda name: seen[name].seconds)
    r.claim(
        "deadline-free distillation on 4 prefill instances: 8% less time", percent(ratio), ratio <= 0.92,
        f"busy {seen['LAPS'].busy:.0%} with pools, {base.busy:.0%} without; least time: {best} "
        f"({percent(seen[best].seconds / base.seconds)}); decode is not simulated",
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    p = parser("python -m benchmark.sim.paper", __doc__, "paper", seed=0, whole=True)
    p.add_argument("--requests", type=int, default=4000, help="per point and instance")
    args = p.parse_args(argv)
    piece = Piece(
        "paper", "The paper's tables, simulated",
        "The policies as they are served, on simulated H200s with Qwen3 (kernels measured by NVIDIA, host assumed). "
        "The baseline of the paper is SGLang without prefill graphs; SGLang 0.5.23 with its own stands beside it.",
        args.seed,
    )  # fmt: skip
    r = Paper(args.requests, args.seed, args.out, piece)
    for question in (single, same_rate, slo, interference, window, distillation):
        question(r)
    claims = Table(
        "The paper's claims", ("claim", "simulated", "verdict", "why"), r.claims,
        "Simulated. A composite load, not the paper's: LMSYS lengths and 5% of 1,024 to 8,192.",
    )  # fmt: skip
    piece.tables.insert(0, claims)
    piece.figures.append(Figure(f"claims reached, of {len(r.reached)}", float(sum(r.reached))))
    piece.leave(args.out, "benchmark.sim.paper", argv, every=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
