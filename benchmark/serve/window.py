"""The waiting window and the latency model on real prefill servers (CPU), and their bars.

    ./run bench window [--rounds 5] [--quick] [--only alone,closed,slo] [--out out/window]

SGLang's overlap loop is off: on a CPU the step itself blocks the scheduler, so that loop would only hold every answer
back until the next batch has run, which no GPU does. The servers of a question stay up and take turns.

- ``alone``: one request at a time; median TTFT with the window over that of the dual queue only.
- ``closed``: closed loop of short prompts; requests/s with AWD and with a fixed 5 ms window over dual queue only. Like
  ``alone`` on a model of many layers (``model.DEEP``).
- ``slo``: Poisson arrivals at 60% of the capacity that a closed loop of the same mix shows on stock fcfs; 90% short
  (16 to 128 tokens), 10% long (2048), on ``model.LIKE_LARGE``. A request violates its SLO when it fails or its TTFT is
  above 3 times the median TTFT of its class alone on the same server, which LAPS is told.

After ``closed`` and ``slo`` the relative error of the fitted step times on held-out steps, from /laps_status.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
from dataclasses import dataclass, replace
from typing import Any

from laps_plan.traffic.job import LONG, SHORT, THRESHOLD, Job
from laps_plan.traffic.lengths import fixed, lmsys, mix, uniform
from laps_plan.traffic.named import Drawn

from benchmark.load import client
from benchmark.load.prompts import Prompts
from benchmark.results import (
    KINDS,
    Column,
    Command,
    Comparison,
    Parser,
    Piece,
    bars,
    in_turns,
    pictures,
    ratio,
    some_of,
)
from benchmark.rig import model, servers
from benchmark.rig.devices import CPU, DEVICES, MODELS, Device
from benchmark.rig.fleet import Fleet, get_json
from benchmark.rig.variants import BUILT_IN, LAPS, ON, STOCK, Variant
from benchmark.serve import compare, tables
from benchmark.serve.compare import Bench, Measured, Settings

CHUNK, SLO_CHUNK = 512, 256
DUAL, AWD, FIXED = "dual queue", "AWD", "fixed window"
WINDOWS = (
    Variant(DUAL, (ON, "--laps-wait-window-ms", "0")),
    Variant(AWD, (ON,)),
    Variant(FIXED, (ON, "--laps-config", json.dumps({"window": "fixed"}))),
)
CLIENTS = (1, 4, 8, 16, 32, 64)
LONG_TOKENS, LONG_SHARE, SHORT_TOKENS = 2048, 0.1, (16, 128)
UTILISATION, SLO_FACTOR = 0.6, 3.0
QUESTIONS = ("alone", "closed", "slo")
SHORTS = Drawn("shorts", "", lmsys(THRESHOLD))
"""Prompts with lengths as in LMSYS-Chat-1M, at most 256 tokens."""
PROMPTS = Prompts(model.VOCABULARY, 1, LONG_TOKENS)


def fit(piece: Piece, load: str, fleet: Fleet, name: str) -> dict[str, Any]:
    """Add the error of the server's latency model under this load to the piece; return the whole status."""
    status = get_json(fleet.prefill(name), "/laps_status") or {}
    told = piece.data.setdefault("model", {})[load] = status["latency_model"]
    if error := told["error"]:
        for key, bar in (("median", bars.FIT_MEDIAN), ("p90", bars.FIT_P90)):
            piece.judge(f"step time, {key} relative error, {load}", error[key], bar)
    return status


def device(shape: model.Shape, chunk: int, *args: str, env: dict[str, str] | None = None) -> Device:
    """Return the CPU with another model."""
    base = DEVICES[CPU]
    return replace(
        base, args=(*base.args, *args), chunk=chunk, env={"OMP_NUM_THREADS": "1", **(env or {})}, layers=shape.layers,
        checkpoint=lambda: model.make(MODELS, shape), longest=LONG_TOKENS,
    )  # fmt: skip


def alone(fleet: Fleet, piece: Piece, args: argparse.Namespace) -> None:
    """Measure the median TTFT of lone requests."""

    def once(i: int, name: str) -> float:
        bodies = PROMPTS.bodies(SHORTS.sample(60 if args.quick else 200, random.Random(i)), i)
        return 1e3 * statistics.median(asyncio.run(client.one_by_one(fleet.target(name), bodies)))

    medians = in_turns((DUAL, AWD), args.rounds, once, fleet.say, "alone: ")
    piece.judge("lone TTFT, AWD / dual queue", ratio(medians[AWD], medians[DUAL]), bars.LONE)
    piece.data["alone"] = {"ttft_ms": medians}


def closed(fleet: Fleet, piece: Piece, args: argparse.Namespace) -> None:
    """Measure requests/s over concurrency."""
    settings = Settings(2 * args.rounds, 0.5 if args.quick else 2.0, UTILISATION, 2, SLO_FACTOR, LONG_TOKENS)
    points = Bench(fleet, [v.name for v in WINDOWS], PROMPTS, settings, fleet.say).closed(SHORTS, CLIENTS)
    found, figures = tables.closed(points, DUAL, AWD)
    piece.tables += found
    piece.figures += figures
    status = fit(piece, "closed loop of shorts", fleet, AWD)
    piece.data["closed"] = {"points": {str(n): at for n, at in points.items()}, "window": status["window"]}
    medians = tables.medians(points, "requests_per_s")
    over = {name: [a / b for a, b in zip(medians[name], medians[DUAL], strict=True)] for name in (AWD, FIXED)}
    panels = {"requests/s over the dual queue alone": over}
    pictures.lines(CLIENTS, panels, "clients in a closed loop of short prompts", args.out / "window.svg")
    piece.pictures["window.svg"] = "Requests/s over the dual queue alone."


@dataclass(frozen=True)
class Told(Drawn):
    """The mix, with deadlines on long requests (seconds)."""

    long_slo_s: float = 0.0

    def arrivals(self, offer: Any, rng: random.Random) -> list[Job]:
        jobs = super().arrivals(offer, rng)
        return [replace(job, slo_s=self.long_slo_s) if job.kind == LONG else job for job in jobs]


def slo(piece: Piece, args: argparse.Namespace) -> None:
    """Measure SLO violations in the mixed load."""
    span_s, names = 8.0 if args.quick else 20.0, (*STOCK, LAPS)
    here = device(model.LIKE_LARGE, SLO_CHUNK, env=servers.KEEP_MEMORY)
    lengths = mix(uniform(*SHORT_TOKENS), fixed(LONG_TOKENS), LONG_SHARE)
    with Fleet(here, [BUILT_IN[name] for name in STOCK], PROMPTS, args.out, args.say, together=True) as fleet:
        fcfs, rng = fleet.target(STOCK[0]), random.Random(3)
        lone = {}
        for kind, draw, n in ((SHORT, uniform(*SHORT_TOKENS), 40), (LONG, fixed(LONG_TOKENS), 10)):
            bodies = PROMPTS.bodies([Job(0.0, draw(rng)) for _ in range(n)], 3)
            lone[kind] = statistics.median(asyncio.run(client.one_by_one(fcfs, bodies)))
        limit = {kind: SLO_FACTOR * s for kind, s in lone.items()}
        mixed = Told("slo", "", lengths, long_slo_s=limit[LONG])
        capacity = compare.capacity(fcfs, mixed, PROMPTS, span_s / 2, 4).requests_per_s
        fleet.add(Variant(LAPS, (ON, "--laps-ttft-slo-ms", f"{1e3 * limit[SHORT]:.1f}")))
        by_kind = compare.Lone((THRESHOLD, THRESHOLD + 1, LONG_TOKENS), (lone[SHORT], lone[LONG], lone[LONG]))
        settings = Settings(args.rounds, span_s, UTILISATION, 100, SLO_FACTOR, LONG_TOKENS)
        seen = Bench(fleet, names, PROMPTS, settings, args.say).run(mixed, Measured(by_kind, capacity, STOCK[0]))
        status = fit(piece, "mixed open load", fleet, LAPS)
    rounds = seen.comparison.rounds
    figures = Comparison(
        {n: [{k: {**r[k], "late": 1.0 - r[k]["goodput"]} for k in KINDS} for r in of] for n, of in rounds.items()}
    )
    late = [Column(f"{k} in violation", (k, "late"), ".1%") for k in KINDS]
    note = ", ".join(f"SLO of {k} requests {1e3 * v:.0f} ms" for k, v in limit.items())
    title = f"Mixed open load, {UTILISATION * capacity:.1f} requests/s: SLO violations"
    columns = (*late, *(Column(f"{k} P90 ms", (k, "p90_ms")) for k in KINDS))
    piece.tables.append(figures.table(title, "", columns, note))
    best = min(STOCK, key=lambda name: statistics.mean(figures.values(name, SHORT, "late")))
    over = figures.ratio(LAPS, best, SHORT, "late")
    piece.judge(f"short requests in violation, LAPS / {best}, the best of stock", over, bars.VIOLATIONS)
    piece.data["slo"] = {
        "slo_ms": {k: 1e3 * v for k, v in limit.items()}, "capacity_per_s": capacity,
        "rate_per_s": UTILISATION * capacity, "window": status["window"],
        "violations": {k: {n: figures.values(n, k, "late") for n in names} for k in KINDS},
        "ttft_p90_ms": {k: {n: figures.values(n, k, "p90_ms") for n in names} for k in KINDS},
        "busy_share": statistics.median(seen.busy[LAPS]),
    }  # fmt: skip


def options(p: Parser) -> None:
    """Add the options of this command."""
    p.add_argument("--quick", action="store_true", help="a third of the load per round, for a quick check")
    words = f"some of {', '.join(QUESTIONS)}, separated by commas"
    p.add_argument("--only", type=some_of(QUESTIONS, "question"), default=list(QUESTIONS), help=words)


def run(args: argparse.Namespace) -> Piece:
    """Answer the questions."""
    text = (
        "Servers with the dual queue alone, with AWD and with a fixed window, in turns; then deadlines in a mixed "
        f"open load. {args.rounds} rounds."
    )
    piece = Piece("window", "The waiting window, deadlines and the latency model", text, 1)
    if {"alone", "closed"} & set(args.only):
        # Token ids in and out: tokenizer processes would compete with the emulating cores.
        here = device(model.DEEP, CHUNK, "--skip-tokenizer-init")
        with Fleet(here, WINDOWS, PROMPTS, args.out, args.say, together=True) as fleet:
            for name, measure in (("alone", alone), ("closed", closed)):
                if name in args.only:
                    measure(fleet, piece, args)
    if "slo" in args.only:
        slo(piece, args)
    return piece


COMMAND = Command("./run bench window", __doc__, run, options, out="window", rounds=5)

if __name__ == "__main__":
    sys.exit(COMMAND.main())
