"""The paper's tables again, in the simulator: H200, Qwen2.5, analytic profiles.

    python -m benchmark.sim.paper

"vanilla" is stock fcfs without prefill graphs, what the paper compared with; "graphs only" adds the graphs, "dual queue
only" the two queues without the window, "full" is LAPS. SGLang 0.5.23 with its own prefill graphs stands beside them.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_router_laps.config import AllocConfig

from benchmark.results import pictures
from benchmark.results.piece import Figure, Piece, Table, command
from benchmark.sim.metrics import Outcome
from benchmark.sim.profile import Profile
from benchmark.sim.variants import VARIANTS, run
from benchmark.workloads.lengths import Sizes, fixed, lmsys, log_uniform, mix
from benchmark.workloads.streams import Closed, Jobs, Open, Stream, populations

OUT = Path(__file__).resolve().parents[2] / "out" / "paper"
MODELS = ("7b", "14b", "32b")
PATHS = {
    "vanilla": "eager-fcfs",
    "graphs only": "eager-fcfs-graphs",
    "dual queue only": "eager-dual",
    "full": "eager-laps-graphs",
    "0.5.23 fcfs": "fcfs",
    "0.5.23 LAPS": "laps-graphs",
}
CLIENTS = (1, 2, 4, 8, 16, 32, 64)
HIGH = 32
"""Clients from here on are called many."""
LONG_SHARE, LONG_TOKENS = 0.05, (1024, 8192)
SLO_S = 0.4
WARM = 0.1


def sizes() -> Sizes:
    """A composite: LMSYS lengths, 5% of the requests replaced by 1,024 to 8,192 tokens."""
    return mix(lmsys(), log_uniform(*LONG_TOKENS), LONG_SHARE)


@dataclass
class Claim:
    """What the paper says, and what came out."""

    text: str
    value: str
    reached: bool | None
    why: str

    def row(self) -> tuple[str, ...]:
        """For the table."""
        told = {True: "reached", False: "not reached", None: "not comparable"}[self.reached]
        return self.text, self.value, told, self.why


@dataclass
class Point:
    """One simulation in a few numbers. Times in seconds."""

    rate: float
    mean: float
    short_p90: float
    long_p90: float
    over: float
    """Share of TTFTs above the SLO (0..1)."""
    busy: float
    steps: float
    """Steps per request."""
    overhead: float
    """Share of busy time that is the fixed cost of steps, whatever they hold (0..1)."""
    seconds: float

    @classmethod
    def of(cls, o: Outcome) -> Point:
        """Without the run-in."""
        groups = o.groups(slo_s=SLO_S, warm=WARM)

        def p90(kind: str) -> float:
            return groups[kind].ttft["p90"] if groups[kind].requests else float("nan")

        graph = o.profile.graph_fixed_s or 0.0
        fixed_s = (o.batches - o.replayed) * o.profile.coefficients.fixed + o.replayed * graph
        return cls(
            o.rate, groups["all"].ttft["mean"], p90("short"), p90("long"), groups["all"].violations or 0.0,
            o.utilisation, o.batches / max(1, len(o.record)), fixed_s / sum(o.busy_s), o.seconds,
        )  # fmt: skip


@dataclass
class Run:
    """Settings of the whole run, and what it has found."""

    requests: int
    seed: int
    out: Path
    tables: list[Table]
    claims: list[Claim]
    figures: list[Figure]
    captions: dict[str, str]
    data: dict[str, Any]

    def point(self, path: str, model: str, load: Callable[[], Stream], **how: Any) -> Point:
        """Simulate one variant."""
        profile = Profile.load(f"h200-qwen2.5-{model}")
        return Point.of(run(VARIANTS[path], load(), profile, seed=self.seed, **how))


def percent(x: float) -> str:
    """A ratio as a change."""
    return f"{100 * (x - 1):+.0f}%"


def single(r: Run) -> None:
    """One instance, 1 to 64 clients in a closed loop."""
    found: dict[str, dict[str, list[Point]]] = {}
    for model in MODELS:
        found[model] = {
            name: [r.point(v, model, lambda c=c: Closed(sizes(), c, r.requests, r.seed)) for c in CLIENTS]  # type: ignore[misc]
            for name, v in PATHS.items()
        }
        rows: list[Sequence[str]] = [
            (
                str(c),
                *(f"{found[model][n][i].rate:.0f}" for n in PATHS),
                *(f"{1e3 * found[model][n][i].mean:.0f}" for n in PATHS),
                *(f"{1e3 * found[model][n][i].short_p90:.0f}" for n in PATHS),
            )
            for i, c in enumerate(CLIENTS)
        ]
        heads = ("clients", *(f"{n} {u}" for u in ("req/s", "mean ms", "short P90") for n in PATHS))
        r.tables.append(Table(f"One instance, Qwen2.5-{model.upper()}: closed loop", heads, rows))
    r.data["single"] = {m: {n: [vars(p) for p in ps] for n, ps in by.items()} for m, by in found.items()}
    by = found["7b"]
    pictures.lines(
        CLIENTS,
        [
            ("requests/s", {n: [p.rate for p in ps] for n, ps in by.items()}),
            ("mean TTFT (ms)", {n: [1e3 * p.mean for p in ps] for n, ps in by.items()}),
            ("short P90 TTFT (ms)", {n: [1e3 * p.short_p90 for p in ps] for n, ps in by.items()}),
        ],
        "clients", r.out / "single.svg", log_y=True,
    )  # fmt: skip
    r.captions["single.svg"] = "One H200 with Qwen2.5-7B: throughput and TTFT against concurrency (simulated)."
    _single_claims(r, found)


def _single_claims(r: Run, found: Mapping[str, Mapping[str, Sequence[Point]]]) -> None:
    many = [i for i, c in enumerate(CLIENTS) if c >= HIGH]
    mean = statistics.median(by["full"][i].mean / by["vanilla"][i].mean for by in found.values() for i in many)
    short = statistics.median(
        by["full"][i].short_p90 / by["vanilla"][i].short_p90 for by in found.values() for i in many
    )
    at = found["7b"]["full"][many[-1]]
    base = found["7b"]["vanilla"][many[-1]]
    shift = f"of 7B at {CLIENTS[-1]} clients, short P90 went from {1e3 * base.short_p90:.0f} to {1e3 * at.short_p90:.0f} ms, long from {1e3 * base.long_p90:.0f} to {1e3 * at.long_p90:.0f}"  # noqa: E501
    r.claims.append(Claim("prefill latency -30% and more (mean TTFT, many clients)", percent(mean), mean <= 0.7, shift))
    r.claims.append(Claim("the same for short requests' P90", percent(short), short <= 0.7, shift))
    for model, text, least, points in (
        ("7b", "up to +20% requests/s with 1 instance (best of 1 to 64 clients)", 1.2, range(len(CLIENTS))),
        ("32b", "+35% requests/s for 32B under high concurrency", 1.35, many),
    ):
        full, vanilla = found[model]["full"], found[model]["vanilla"]
        best = max(points, key=lambda i: full[i].rate / vanilla[i].rate)
        gain = full[best].rate / vanilla[best].rate
        f, v = full[best], vanilla[best]
        why = (
            f"at {CLIENTS[best]} clients vanilla was busy {v.busy:.0%} and spent {v.overhead:.0%} of that on the fixed "
            f"cost of steps, which is all that scheduling can save; full took {f.steps:.2f} steps a request instead of "
            f"{v.steps:.2f} and spent {f.overhead:.0%}"
        )
        worst = min(full[i].rate / vanilla[i].rate for i in points)
        r.claims.append(Claim(text, f"{percent(gain)} (worst {percent(worst)})", gain >= least, why))
    alone = statistics.median(by["graphs only"][i].rate / by["vanilla"][i].rate for by in found.values() for i in many)
    after = statistics.median(by["full"][i].rate / by["dual queue only"][i].rate for by in found.values() for i in many)
    r.claims.append(
        Claim(
            "graphs alone bring little; the two queues make them pay (requests/s, many clients)",
            f"{percent(alone)} alone, {percent(after)} on top of the two queues", alone <= 1.05 and after > alone,
            "a batch that holds a long prompt fits no graph; batches of short ones do",
        )
    )  # fmt: skip


def same_rate(r: Run) -> None:
    """One instance, the same requests/s for all: shares of what vanilla serves 64 clients in a closed loop."""
    profile = Profile.load("h200-qwen2.5-7b")
    capacity = run(VARIANTS["eager-fcfs"], Closed(sizes(), 64, r.requests, r.seed), profile, seed=r.seed).rate
    shares = (0.3, 0.5, 0.7, 0.8, 0.9)
    seen = {
        name: [
            r.point(path, "7b", lambda u=u: Open(sizes(), u * capacity, 5 * r.requests, r.seed))  # type: ignore[misc]
            for u in shares
        ]
        for name, path in PATHS.items()
    }
    rows: list[Sequence[str]] = [
        (f"{u:.0%}", *(f"{1e3 * getattr(seen[n][i], a):.0f}" for a in ("mean", "short_p90", "long_p90") for n in PATHS))
        for i, u in enumerate(shares)
    ]  # fmt: skip
    heads = ("of capacity", *(f"{n} {u}" for u in ("mean ms", "short P90", "long P90") for n in PATHS))
    r.tables.append(
        Table("One instance, Qwen2.5-7B: Poisson arrivals", heads, rows, f"Capacity: {capacity:.0f} requests/s.")
    )
    r.data["same rate"] = {n: [vars(p) for p in ps] for n, ps in seen.items()}
    for base, mine in (("vanilla", "full"), ("0.5.23 fcfs", "0.5.23 LAPS")):
        changes = [f.mean / v.mean for f, v in zip(seen[mine], seen[base], strict=True)]
        best = min(range(len(shares)), key=lambda i: changes[i])
        f, v = seen[mine][best], seen[base][best]
        r.claims.append(
            Claim(f"average latency -20% at the same requests/s ({mine} / {base}, median of loads)",
                  percent(statistics.median(changes)), statistics.median(changes) <= 0.8,
                  f"best {percent(changes[best])} at {shares[best]:.0%} of capacity: short P90 {1e3 * v.short_p90:.0f} "
                  f"to {1e3 * f.short_p90:.0f} ms, long P90 {1e3 * v.long_p90:.0f} to {1e3 * f.long_p90:.0f} ms")
        )  # fmt: skip


def slo(r: Run) -> None:
    """Violations of a TTFT of 0.4 s against concurrency, 1 and 8 instances."""
    for servers, clients in ((1, (4, 8, 16, 32, 64, 128)), (8, (32, 64, 128, 256, 512, 1024))):
        ways = {
            "plain data parallel": ("eager-fcfs", "round-robin"),
            "SGLang router": ("eager-fcfs", "least-load"),
            "LAPS": ("eager-laps-graphs", "pools"),
        }
        knobs = {"LAPS": {"ttft_slo_ms": 1e3 * SLO_S}}
        if servers == 1:
            del ways["plain data parallel"]
        n = r.requests * servers // 2
        seen = {
            name: [
                r.point(
                    path, "7b", lambda c=c, n=n: Closed(sizes(), c, n, r.seed),  # type: ignore[misc]
                    servers=servers, router=router, knobs=knobs.get(name), alloc=AllocConfig(),
                )
                for c in clients
            ]
            for name, (path, router) in ways.items()
        }  # fmt: skip
        rows: list[Sequence[str]] = [
            (str(c), *(f"{100 * seen[n][i].over:.1f}%" for n in ways), *(f"{seen[n][i].rate:.0f}" for n in ways))
            for i, c in enumerate(clients)
        ]
        heads = ("clients", *(f"{n}: over 0.4 s" for n in ways), *(f"{n} req/s" for n in ways))
        r.tables.append(Table(f"TTFT over 0.4 s, Qwen2.5-7B, {servers} instance(s)", heads, rows))
        name = f"slo-{servers}.svg"
        pictures.lines(
            clients, [("requests over 0.4 s (%)", {n: [100 * p.over for p in ps] for n, ps in seen.items()})],
            "clients", r.out / name,
        )  # fmt: skip
        r.captions[name] = f"Requests above a TTFT of 0.4 s, {servers} instance(s) (simulated)."
        r.data[f"slo {servers}"] = {n: [vars(p) for p in ps] for n, ps in seen.items()}
        _slo_claims(r, servers, clients, seen)


def _slo_claims(r: Run, servers: int, clients: Sequence[int], seen: Mapping[str, Sequence[Point]]) -> None:
    laps, router = seen["LAPS"], seen["SGLang router"]
    best = max(range(len(clients)), key=lambda i: router[i].over - laps[i].over)
    gaps = [100 * (b.over - a.over) for a, b in zip(laps, router, strict=True)]
    span = f"{min(gaps):+.0f} to {max(gaps):+.0f}"

    def told(i: int) -> str:
        parts = ", ".join(f"{n} {100 * ps[i].over:.1f}%" for n, ps in seen.items())
        return f"at {clients[i]} clients: {parts}; long P90 {router[i].long_p90:.2f} s with the SGLang router, {laps[i].long_p90:.2f} with LAPS"  # noqa: E501

    if servers == 1:
        r.claims.append(
            Claim("1 instance, TTFT 0.4 s: violations 10 points below the SGLang router (median of loads)",
                  f"{statistics.median(gaps):+.0f} points ({span})", statistics.median(gaps) >= 10, told(best))
        )  # fmt: skip
        r.claims.append(
            Claim("1 instance: 30 points below plain data parallel", "-", None,
                  "one instance has nothing to be parallel with; it is the row above")
        )  # fmt: skip
        return
    plain = seen["plain data parallel"]
    # Where the router loses as many as it did in the paper.
    like = min(range(len(clients)), key=lambda i: abs(router[i].over - 0.047))
    r.claims.append(
        Claim("8 instances: 0% of requests over 0.4 s against 4.7%",
              f"{laps[like].over:.1%} against {router[like].over:.1%}",
              laps[like].over <= 0.005 < router[like].over, told(like))
    )  # fmt: skip
    below = statistics.median(100 * (b.over - a.over) for a, b in zip(laps, plain, strict=True))
    r.claims.append(
        Claim("8 instances: violations 28 points below plain data parallel, 12 below the router (median of loads)",
              f"{below:+.0f} and {statistics.median(gaps):+.0f} points (router: {span})",
              below >= 28 and statistics.median(gaps) >= 12, told(best))
    )  # fmt: skip


def interference(r: Run) -> None:
    """What the one class costs the other, in closed loops of both."""
    span_s, ladder = 30.0, (0, 1, 4, 16, 64)
    for fixed_kind, moving, short_clients, long_clients in (
        ("long", "short", ladder, (2,) * len(ladder)),
        ("short", "long", (16,) * len(ladder), (0, 1, 2, 4, 8)),
    ):
        x = short_clients if moving == "short" else long_clients
        seen: dict[str, list[Point]] = {}
        for name, path in (("vanilla", "eager-fcfs"), ("0.5.23 fcfs", "fcfs"), ("full", "eager-laps-graphs")):
            seen[name] = [
                r.point(
                    path, "7b",
                    lambda s=s, n=n: populations([(lmsys(256), s), (fixed(4096), n)], r.seed),  # type: ignore[misc]
                    until_s=span_s,
                )
                for s, n in zip(short_clients, long_clients, strict=True)
            ]  # fmt: skip
        curves = {
            n: [1e3 * (p.long_p90 if fixed_kind == "long" else p.short_p90) for p in ps] for n, ps in seen.items()
        }
        rows: list[Sequence[str]] = [(str(n), *(f"{y[i]:.0f}" for y in curves.values())) for i, n in enumerate(x)]
        title = f"{fixed_kind} P90 TTFT (ms) with more {moving} clients"
        r.tables.append(Table(title, (f"{moving} clients", *seen), rows, "7B; long: 4,096 tokens; closed loops."))
        r.data[title] = {n: [vars(p) for p in ps] for n, ps in seen.items()}
        r.captions[f"interference-{moving}.svg"] = title + " (simulated)."
        pictures.lines(
            [max(v, 0.5) for v in x],
            [(f"{fixed_kind} P90 TTFT (ms)", curves)],
            f"{moving} clients (0 drawn at 0.5)", r.out / f"interference-{moving}.svg", log_y=True,
        )  # fmt: skip
        if fixed_kind == "short":
            worst = [p[-1].short_p90 / p[0].short_p90 for p in (seen["vanilla"], seen["full"])]
            r.claims.append(
                Claim("long work hardly touches short requests once they have their own queue",
                      f"{worst[0]:.1f}x without, {worst[1]:.1f}x with LAPS", worst[1] < 0.5 * worst[0],
                      f"short P90 with {x[-1]} long clients over that with none")
            )  # fmt: skip


def window(r: Run) -> None:
    """The waiting window's curve."""
    widths = (0.0, 1.0, 2.0, 5.0, 10.0, 20.0)
    clients = (4, 16, 64)
    rows: list[Sequence[str]] = []
    panels: dict[str, list[Point]] = {}
    curves: dict[str, dict[str, list[Point]]] = {}
    for kind in ("awd", "fixed"):
        curves[kind] = {
            f"{kind}, {c} clients": [
                r.point(
                    "eager-laps-graphs", "7b", lambda c=c: Closed(lmsys(256), c, r.requests, r.seed),  # type: ignore[misc]
                    knobs={"window": kind, "wait_window_ms": w},
                )
                for w in widths
            ]
            for c in clients
        }  # fmt: skip
        panels.update(curves[kind])
    for i, w in enumerate(widths):
        rows.append((f"{w:g}", *(f"{p[i].rate:.0f}" for p in panels.values()),
                     *(f"{1e3 * p[i].mean:.1f}" for p in panels.values())))  # fmt: skip
    heads = ("window ms", *(f"{n} req/s" for n in panels), *(f"{n} ms" for n in panels))
    r.tables.append(Table("Short requests only: the waiting window", heads, rows, "7B; mean TTFT."))
    pictures.lines(
        widths,
        [("requests/s", {n: [p.rate for p in ps] for n, ps in panels.items()}),
         ("mean TTFT (ms)", {n: [1e3 * p.mean for p in ps] for n, ps in panels.items()})],
        "longest window (ms)", r.out / "window.svg", log_x=False,
    )  # fmt: skip
    r.captions["window.svg"] = "Throughput and TTFT of short requests against the waiting window (simulated)."
    r.data["window"] = {n: [vars(p) for p in ps] for n, ps in panels.items()}
    gains = [max(p.rate for p in ps) / ps[0].rate for ps in curves["awd"].values()]
    losses = [min(p.rate for p in ps) / ps[0].rate for ps in curves["awd"].values()]
    plain = [min(p.rate for p in ps) / ps[0].rate for ps in curves["fixed"].values()]
    r.claims.append(
        Claim("waiting a few milliseconds buys throughput",
              f"{percent(max(gains))} at best, {percent(min(losses))} at worst",
              max(gains) >= 1.05,
              f"a fixed window costs up to {percent(min(plain))}: at {clients[-1]} clients batches fill by themselves")
    )  # fmt: skip


def distillation(r: Run) -> None:
    """Offline work without deadlines on 4 instances: how long until all is done."""
    ways = {
        "plain data parallel": ("eager-fcfs", "round-robin"),
        "SGLang router": ("eager-fcfs", "least-load"),
        "LAPS": ("eager-laps-graphs", "pools"),
        "LAPS schedulers, SGLang router": ("eager-laps-graphs", "least-load"),
    }
    n, in_flight = 4 * r.requests, 256
    seen = {
        name: r.point(path, "7b", lambda: Jobs(sizes(), in_flight, n, r.seed), servers=4, router=router)
        for name, (path, router) in ways.items()
    }
    base = seen["plain data parallel"].seconds
    rows: list[Sequence[str]] = [
        (name, f"{p.seconds:.1f}", percent(p.seconds / base), f"{p.busy:.0%}", f"{p.steps:.2f}", f"{p.overhead:.0%}")
        for name, p in seen.items()
    ]
    heads = ("", "seconds", "", "busy", "steps/request", "fixed cost of steps")
    r.tables.append(Table(f"{n} requests, {in_flight} in flight, 4 instances of 7B, no deadlines", heads, rows))
    r.data["distillation"] = {n: vars(p) for n, p in seen.items()}
    ratio = seen["LAPS"].seconds / base
    best = min(seen, key=lambda k: seen[k].seconds)
    r.claims.append(
        Claim("deadline-free distillation on 4 prefill instances: 8% less time", percent(ratio), ratio <= 0.92,
              f"busy {seen['LAPS'].busy:.0%} with pools, {seen['plain data parallel'].busy:.0%} without; least time: "
              f"{best} ({percent(seen[best].seconds / base)}); decode is not simulated")
    )  # fmt: skip


QUESTIONS = (single, same_rate, slo, interference, window, distillation)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmark.sim.paper", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=4000, help="per point and instance")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    r = Run(args.requests, args.seed, args.out, [], [], [], {}, {})
    for question in QUESTIONS:
        question(r)
    table = Table(
        "The paper's claims", ("claim", "simulated", "verdict", "why"), list[Sequence[str]](c.row() for c in r.claims),
        "Analytic profiles, not measured. A composite load, not the paper's: LMSYS lengths and 5% of 1,024 to 8,192.",
    )  # fmt: skip
    counted = [c for c in r.claims if c.reached is not None]
    r.figures.append(Figure(f"claims reached, of {len(counted)}", float(sum(bool(c.reached) for c in counted))))
    piece = Piece(
        "paper", "The paper's tables, simulated",
        "The policies as they are served, on simulated H200s with Qwen2.5 (analytic roofline profiles, not measured). "
        "The baseline of the paper is SGLang without prefill graphs; SGLang 0.5.23 with its own stands beside it.",
        args.seed, [table, *r.tables], r.figures, r.captions, r.data, command("benchmark.sim.paper", argv),
    )  # fmt: skip
    piece.write(args.out)
    piece.tell(args.out, every=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
