"""The waiting window and the latency model on real prefill servers (CPU), against what they must show.

    python -m benchmark.window [--rounds 5] [--quick] [--only alone,closed,slo,model] [--out out/window]

SGLang's overlap loop is off for all of them: on a CPU the step itself blocks the scheduler, so that loop would only
hold every answer back until the next batch has run, which no GPU does.

All servers of a question stay up, asleep while idle; one at a time is loaded, in turns (A B C, C B A, ...). Figures are
medians over rounds of per-round ratios, with the interval that covers the median with 90% or more.

- ``alone``: one request at a time; median TTFT with the window over that of the dual queue only. Bar: at most 1.03.
- ``closed``: closed loop of short prompts; requests/s with AWD and with a fixed 5 ms window over dual queue only. Bar:
  AWD never below 0.98, at least 1.05 at its best point. Like ``alone`` on a model of many layers (``model.DEEP``).
- ``slo``: Poisson arrivals at 60% of the capacity that a closed loop of the same mix shows on stock fcfs; 90% short
  (16 to 128 tokens), 10% long (2048), on ``model.LIKE_LARGE``. A short request violates its SLO when its TTFT, as its
  client sees it, is above 3 times the median TTFT of short requests alone on the same server; a long one when above 3
  times the lone long TTFT, which LAPS is told by ``custom_params.ttft_slo_ms``. A failed request violates it. Bar: the
  share of short requests in violation at most half that of the best stock policy; long ones stand beside it.
- ``model``: relative error of the fitted step times on held-out steps after the load of ``slo`` (and of ``closed``),
  from /laps_status. Bar: median at most 10%, P90 at most 25%.

``result.json``, ``window.png`` and the servers' logs go to ``--out``. With ``--only``, answers to the other questions
that are there stay.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import platform
import random
import signal
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import uvloop

from benchmark.rig import fast, lengths, model, servers
from benchmark.rig.piece import Table
from benchmark.rig.rounds import Ratio, interleaved, ratio
from benchmark.window_picture import draw

OUT = model.REPO / "out"
ENV = {"OMP_NUM_THREADS": "1"}
SLO_ENV = {**ENV, **servers.KEEP_MEMORY}
CHUNK = 512
BASE = ("--chunked-prefill-size", str(CHUNK), "--max-total-tokens", "49152", "--disable-overlap-schedule")
SLO_CHUNK = ("--chunked-prefill-size", "256")
LAPS = ("--enable-laps-scheduler",)
DUAL, AWD, FIXED = "dual queue", "AWD", "fixed window"
WINDOWS = {
    DUAL: (*LAPS, "--laps-wait-window-ms", "0"),
    AWD: LAPS,
    FIXED: (*LAPS, "--laps-config", json.dumps({"window": "fixed"})),
}
STOCK = {p: ("--schedule-policy", p) for p in ("fcfs", "hrrn", "shortest-prefill-first")}
SLO = "LAPS"
CLIENTS = (1, 4, 8, 16, 32, 64)
SHORT, LONG = "short", "long"
LONG_TOKENS, LONG_SHARE, SHORT_TOKENS = 2048, 0.1, (16, 128)
UTILISATION, SLO_FACTOR = 0.6, 3.0
QUESTIONS = ("alone", "closed", "slo", "model")


@dataclass
class Bench:
    """One run: its settings, its figures so far."""

    rounds: int
    quick: bool
    out: Path
    result: dict[str, Any] = field(default_factory=dict)
    models: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Latency model by the load it was fitted under."""

    def say(self, text: str) -> None:
        print(text, flush=True)

    @contextlib.contextmanager
    def up(
        self, variants: Mapping[str, Sequence[str]], shape: model.Shape, *more: str, env: Mapping[str, str] = ENV
    ) -> Iterator[dict[str, servers.Server]]:
        """Servers of these variants (SGLang's arguments), one started after the other: all at once is slower."""
        checkpoint = model.make(OUT / "models", shape)
        started = {}
        with contextlib.ExitStack() as stack:
            for name, args in variants.items():
                log = self.out / "logs" / f"{name.replace(' ', '-')}.log"
                started[name] = servers.prefill(checkpoint, log, *BASE, *more, *args, env=dict(env), name=name)
                stack.enter_context(started[name]).ready()
                asyncio.run(fast.one_by_one(started[name].port, shorts(32, seed=1)))
            yield started


def shorts(n: int, seed: int) -> list[bytes]:
    """``n`` prefills with lengths as in LMSYS-Chat-1M, at most 256 tokens."""
    rng = random.Random(seed)
    return [fast.prefill(tokens, rng) for tokens in lengths.short(n, rng)[0]]


# -- one request at a time, and closed loops


def alone(bench: Bench, up: dict[str, servers.Server]) -> None:
    """Median TTFT of lone requests."""
    n = 60 if bench.quick else 200
    medians: dict[str, list[float]] = {name: [] for name in (DUAL, AWD)}
    for i, name in interleaved(tuple(medians), bench.rounds):
        times = asyncio.run(fast.one_by_one(up[name].port, shorts(n, seed=i)))
        medians[name].append(statistics.median(times) * 1e3)
    r = ratio(medians[AWD], medians[DUAL])
    heads = ("", *medians, "AWD / dual queue", "bar")
    row = ("", *(f"{statistics.median(v):.2f}" for v in medians.values()), str(r), met(r.median <= 1.03, "<= 1.03"))
    bench.say(f"\n{Table('One request at a time: median TTFT (ms)', heads, [row])}")
    bench.result["alone"] = {"ttft_ms": medians, "ratio": r.as_dict(), "met": r.median <= 1.03}


def closed(bench: Bench, up: dict[str, servers.Server]) -> None:
    """Requests/s over concurrency."""
    seconds = 0.5 if bench.quick else 2.0
    bodies = shorts(4000, seed=2)
    points: dict[int, dict[str, Ratio]] = {}
    out: dict[str, Any] = {}
    rows = []
    for clients in CLIENTS:
        rate: dict[str, list[float]] = {name: [] for name in WINDOWS}
        ttft: dict[str, list[float]] = {name: [] for name in WINDOWS}
        # A round is A B C, C B A: what drifts meanwhile falls on all of them.
        for i, name in interleaved(tuple(WINDOWS), 2 * bench.rounds):
            # Every variant of a round is given the same prompts.
            work = itertools.islice(itertools.cycle(bodies), 997 * i, None)
            loop = asyncio.run(fast.closed_loop(up[name].port, work, clients, seconds))
            if loop.failed:
                raise SystemExit(f"{name}: {loop.failed} requests failed at {clients} clients")
            rate[name].append(loop.rate)
            ttft[name].append(statistics.median(loop.ttft_s) * 1e3)
        rate = {name: [(a + b) / 2 for a, b in zip(v[::2], v[1::2], strict=True)] for name, v in rate.items()}
        r = points[clients] = {name: ratio(rate[name], rate[DUAL]) for name in (AWD, FIXED)}
        out[str(clients)] = {
            "requests_per_s": rate,
            "ttft_p50_ms": ttft,
            "ratio": {name: x.as_dict() for name, x in r.items()},
        }
        rows.append((
            str(clients), f"{statistics.median(rate[DUAL]):.0f}", str(r[AWD]), r[AWD].verdict, str(r[FIXED]),
            r[FIXED].verdict, *(f"{statistics.median(ttft[name]):.1f}" for name in WINDOWS),
        ))  # fmt: skip
    worst, best = (f(x[AWD].median for x in points.values()) for f in (min, max))
    heads = ("clients", "dual queue /s", "AWD / dual", "", "fixed / dual", "", *(f"TTFT {n}" for n in WINDOWS))
    bench.say(f"\n{Table('Closed loop of short prompts: requests/s', heads, rows)}")
    bench.say(
        f"AWD at worst {worst:.3f}: {met(worst >= 0.98, '>= 0.98')}; at best {best:.3f}: {met(best >= 1.05, '>= 1.05')}"
    )
    status = {name: up[name].laps_status() for name in WINDOWS}
    bench.models["closed loop of shorts"] = status[AWD]["latency_model"]
    bench.result["closed"] = {
        "points": out, "worst": worst, "best": best, "met": worst >= 0.98 and best >= 1.05,
        "prompts": lengths.short(1, random.Random(0))[1],
        "windows": {name: s["window"] for name, s in status.items()},
    }  # fmt: skip


# -- open load with an SLO


def mixed(rate: float, span_s: float, seed: int, long_slo_ms: float | None) -> list[fast.Arrival]:
    """Poisson arrivals of the mix."""
    rng, at, arrivals = random.Random(seed), 0.0, []
    while (at := at + rng.expovariate(rate)) < span_s:
        if rng.random() < LONG_SHARE:
            arrivals.append(fast.Arrival(at, LONG, fast.prefill(LONG_TOKENS, rng, long_slo_ms)))
        else:
            arrivals.append(fast.Arrival(at, SHORT, fast.prefill(rng.randint(*SHORT_TOKENS), rng)))
    return arrivals


def lone_s(server: servers.Server, low: int, high: int, n: int) -> float:
    """Median TTFT (seconds) of requests of ``low`` to ``high`` tokens, one at a time."""
    rng = random.Random(3)
    return statistics.median(
        asyncio.run(fast.one_by_one(server.port, [fast.prefill(rng.randint(low, high), rng) for _ in range(n)]))
    )


def violations(seen: Sequence[tuple[str, float | None]], kind: str, slo_s: float) -> float:
    """Share of requests of one kind without a first token in time (0..1)."""
    times = [t for k, t in seen if k == kind]
    return sum(t is None or t > slo_s for t in times) / max(1, len(times))


def slo(bench: Bench) -> None:
    """SLO violations in the mixed load."""
    span_s = 8.0 if bench.quick else 20.0
    with contextlib.ExitStack() as stack:
        up = stack.enter_context(bench.up(STOCK, model.LIKE_LARGE, *SLO_CHUNK, env=SLO_ENV))
        short_s = lone_s(up["fcfs"], *SHORT_TOKENS, 40)
        long_s = lone_s(up["fcfs"], LONG_TOKENS, LONG_TOKENS, 10)
        work = itertools.cycle([a.raw for a in mixed(50.0, 20.0, 4, None)])
        capacity = asyncio.run(fast.closed_loop(up["fcfs"].port, work, 32, span_s / 2, 1.0)).rate
        slo_s = {SHORT: SLO_FACTOR * short_s, LONG: SLO_FACTOR * long_s}
        rate = UTILISATION * capacity
        bench.say(
            f"\nlone TTFT {short_s * 1e3:.1f} ms short, {long_s * 1e3:.0f} ms long; SLOs {slo_s[SHORT] * 1e3:.0f} and "
            f"{slo_s[LONG] * 1e3:.0f} ms; capacity {capacity:.0f} requests/s, offered {rate:.0f}/s"
        )
        told = (*LAPS, "--laps-ttft-slo-ms", f"{slo_s[SHORT] * 1e3:.1f}")
        up |= stack.enter_context(bench.up({SLO: told}, model.LIKE_LARGE, *SLO_CHUNK, env=SLO_ENV))
        share: dict[str, dict[str, list[float]]] = {kind: {name: [] for name in up} for kind in slo_s}
        ttft: dict[str, dict[str, list[float]]] = {kind: {name: [] for name in up} for kind in slo_s}
        for i, name in interleaved(tuple(up), bench.rounds):
            arrivals = mixed(rate, span_s, 100 + i, slo_s[LONG] * 1e3)
            seen = asyncio.run(fast.open_loop(up[name].port, arrivals))
            for kind, limit in slo_s.items():
                share[kind][name].append(violations(seen, kind, limit))
                times = sorted(t for k, t in seen if k == kind and t is not None)
                ttft[kind][name].append(times[int(0.9 * len(times))] * 1e3)
        status = up[SLO].laps_status()
    bench.models["mixed open load"] = status["latency_model"]
    mean = {name: statistics.mean(v) for name, v in share[SHORT].items()}
    best = min(STOCK, key=lambda name: mean[name])
    r = ratio(share[SHORT][SLO], share[SHORT][best])
    ok = r.median <= 0.5
    rows = [
        (name, *(f"{100 * statistics.median(share[k][name]):.1f}%" for k in slo_s),
         *(f"{statistics.median(ttft[k][name]):.0f}" for k in slo_s))
        for name in share[SHORT]
    ]  # fmt: skip
    heads = ("", "short in violation", "long in violation", "short P90 ms", "long P90 ms")
    bench.say(f"\n{Table('Mixed open load: SLO violations', heads, rows)}")
    bench.say(f"{SLO} / {best} (best of stock): {r}: {met(ok, '<= 0.5')}")
    bench.result["slo"] = {
        "slo_ms": {k: v * 1e3 for k, v in slo_s.items()}, "capacity_per_s": capacity, "rate_per_s": rate,
        "violations": share, "ttft_p90_ms": ttft, "best_stock": best, "ratio": r.as_dict(), "met": ok,
        "window": status["window"], "busy_share": status["load"]["busy_share"],
    }  # fmt: skip


def latency(bench: Bench) -> None:
    """The fitted model's error under each load."""
    rows, out = [], bench.result.get("model", {})
    for load, status in bench.models.items():
        error = status["error"]
        ok = bool(error) and error["median"] <= 0.10 and error["p90"] <= 0.25
        told = (
            (f"{100 * error['median']:.1f}%", f"{100 * error['p90']:.1f}%", str(error["samples"])) if error else "---"
        )
        rows.append((load, *told, met(ok, "<= 10%, <= 25%")))
        out[load] = {**status, "met": ok}
    bench.say(f"\n{Table('Step times on held-out steps', ('load', 'median error', 'P90', 'steps', 'bar'), rows)}")
    bench.result["model"] = out


def met(ok: bool, bar: str) -> str:
    """In words."""
    return f"{'met' if ok else 'MISSED'} ({bar})"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmark.window", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=5, help="at least 5 for a verdict")
    parser.add_argument("--quick", action="store_true", help="a third of the load a round: a look, not a figure")
    parser.add_argument("--only", default="", help=f"some of {', '.join(QUESTIONS)}, separated by commas")
    parser.add_argument("--out", type=Path, default=OUT / "window")
    args = parser.parse_args(argv)
    wanted = set(filter(None, args.only.split(","))) or set(QUESTIONS)
    if args.rounds < 1 or not wanted <= set(QUESTIONS):
        parser.error(f"--rounds is at least 1; --only takes {', '.join(QUESTIONS)}")
    # Ended by its keeper it still stops its servers.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    uvloop.install()
    begin = time.time()
    args.out.mkdir(parents=True, exist_ok=True)
    bench = Bench(args.rounds, args.quick, args.out)
    record = args.out / "result.json"
    if args.only and record.is_file():
        bench.result = json.loads(record.read_text())
    if wanted & {"alone", "closed"} or wanted == {"model"}:
        # Token ids in and out: the tokenizer's processes would share these few cores with the device they stand for.
        with bench.up(WINDOWS, model.DEEP, "--skip-tokenizer-init") as up:
            if "alone" in wanted:
                alone(bench, up)
            if wanted & {"closed", "model"}:
                closed(bench, up)
    if wanted & {"slo", "model"}:
        slo(bench)
    latency(bench)
    bench.result["run"] = {
        "command": ["python", "-m", "benchmark.window", *(argv or sys.argv[1:])], "rounds": args.rounds,
        "quick": args.quick, "seconds": round(time.time() - begin), "python": platform.python_version(),
        "cores": os.cpu_count(), "load_average": os.getloadavg(),
        "models": {"closed": asdict(model.DEEP), "slo": asdict(model.LIKE_LARGE)},
    }  # fmt: skip
    record.write_text(json.dumps(bench.result, indent=1))
    draw(bench.result, args.out / "window.png")
    bench.say(f"\n{record}, window.png; {time.time() - begin:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
