"""The waiting window and the latency model on real prefill servers (CPU), and their bars.

    python -m benchmark.serve.window [--rounds 5] [--quick] [--only alone,closed,slo] [--out out/window]

SGLang's overlap loop is off for all of them: on a CPU the step itself blocks the scheduler, so that loop would only
hold every answer back until the next batch has run, which no GPU does.

All servers of a question stay up, asleep while idle; one at a time is loaded, in turns (A B C, C B A, ...). Figures are
medians over rounds of per-round ratios, with the interval that covers the median with 90% or more. Bars stand in
``benchmark/results/bars.py``.

- ``alone``: one request at a time; median TTFT with the window over that of the dual queue only.
- ``closed``: closed loop of short prompts; requests/s with AWD and with a fixed 5 ms window over dual queue only. Like
  ``alone`` on a model of many layers (``model.DEEP``).
- ``slo``: Poisson arrivals at 60% of the capacity that a closed loop of the same mix shows on stock fcfs; 90% short
  (16 to 128 tokens), 10% long (2048), on ``model.LIKE_LARGE``. A short request violates its SLO when its TTFT, as its
  client sees it, is above 3 times the median TTFT of short requests alone on the same server; a long one when above 3
  times the lone long TTFT, which LAPS is told by ``custom_params.ttft_slo_ms``. A failed request violates it.

After ``closed`` and ``slo`` the relative error of the fitted step times on held-out steps, from /laps_status.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from laps_plan.traffic.job import LONG, SHORT, THRESHOLD, Job
from laps_plan.traffic.lengths import fixed, lmsys, mix, uniform
from laps_plan.traffic.named import Drawn

from benchmark.load import client
from benchmark.load.prompts import Prompts
from benchmark.results import bars, pictures
from benchmark.results.metrics import KINDS
from benchmark.results.piece import Figure, Piece, Table, parser
from benchmark.results.rounds import in_turns, ratio
from benchmark.rig import model, servers
from benchmark.rig.devices import CPU, DEVICES, MODELS, Device
from benchmark.rig.fleet import Fleet, command_line, get_json
from benchmark.rig.progress import Progress
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


def fit(piece: Piece, load: str, fleet: Fleet, name: str) -> dict[str, Any]:
    """Add the error of the server's latency model under this load to the piece; return the whole status."""
    status = get_json(fleet.prefill(name), "/laps_status") or {}
    told = piece.data.setdefault("model", {})[load] = status["latency_model"]
    if error := told["error"]:
        for key, bar in (("median", bars.FIT_MEDIAN), ("p90", bars.FIT_P90)):
            piece.figures.append(Figure.of(f"step time, {key} relative error, {load}", error[key], bar))
    return status


def device(shape: model.Shape, chunk: int, *args: str, env: dict[str, str] | None = None) -> Device:
    """Return the CPU with another model."""
    base = DEVICES[CPU]
    env = {"OMP_NUM_THREADS": "1", **(env or {})}
    found = replace(base, args=(*base.args, *args), chunk=chunk, env=env, layers=shape.layers)
    return replace(found, checkpoint=lambda: model.make(MODELS, shape), longest=LONG_TOKENS)


def prompts() -> Prompts:
    """Return new prompts of the small model's vocabulary."""
    return Prompts(DEVICES[CPU].vocabulary, 1, LONG_TOKENS, reuse=False, prefill_only=True)


def shorts() -> Drawn:
    """Return prompts with lengths as in LMSYS-Chat-1M, at most 256 tokens."""
    return Drawn("shorts", "", lmsys(THRESHOLD))


def alone(fleet: Fleet, piece: Piece, args: argparse.Namespace) -> None:
    """Measure the median TTFT of lone requests."""

    def once(i: int, name: str) -> float:
        jobs = shorts().sample(60 if args.quick else 200, random.Random(i))
        bodies = fleet.prompts.bodies(jobs, i)
        return 1e3 * statistics.median(asyncio.run(client.one_by_one(fleet.target(name), bodies)))

    medians = in_turns((DUAL, AWD), args.rounds, once, fleet.say, "alone: ")
    piece.figures.append(Figure.of("lone TTFT, AWD / dual queue", ratio(medians[AWD], medians[DUAL]), bars.LONE))
    piece.data["alone"] = {"ttft_ms": medians}


def closed(fleet: Fleet, piece: Piece, args: argparse.Namespace) -> None:
    """Measure requests/s over concurrency."""
    seconds, names = 0.5 if args.quick else 2.0, tuple(v.name for v in WINDOWS)
    settings = Settings(2 * args.rounds, seconds, UTILISATION, 2, SLO_FACTOR, LONG_TOKENS)
    points = Bench(fleet, names, fleet.prompts, settings, fleet.say).closed(shorts(), CLIENTS)
    found, figures, data = tables.closed(points, names, DUAL, AWD)
    piece.tables += found
    piece.figures += figures
    status = fit(piece, "closed loop of shorts", fleet, AWD)
    piece.data["closed"] = {**data, "window": status["window"]}
    medians = {name: [statistics.median(points[n][name]["requests_per_s"]) for n in CLIENTS] for name in names}
    over = {name: [a / b for a, b in zip(medians[name], medians[DUAL], strict=True)] for name in (AWD, FIXED)}
    panels = {"requests/s over the dual queue alone": over}
    pictures.lines(CLIENTS, panels, "clients in a closed loop of short prompts", args.out / "window.svg")
    piece.pictures["window.svg"] = "Requests/s over the dual queue alone."


@dataclass(frozen=True)
class Told(Drawn):
    """The mix, with deadlines on long requests (seconds)."""

    long_slo_s: float = 0.0

    def arrivals(self, offer: Any, rng: random.Random) -> list[Job]:
        return [
            replace(job, slo_s=self.long_slo_s) if job.kind == LONG else job for job in super().arrivals(offer, rng)
        ]


def slo(piece: Piece, args: argparse.Namespace, say: Progress) -> None:
    """Measure SLO violations in the mixed load."""
    span_s, asked = 8.0 if args.quick else 20.0, prompts()
    here = device(model.LIKE_LARGE, SLO_CHUNK, env=servers.KEEP_MEMORY)
    lengths = mix(uniform(*SHORT_TOKENS), fixed(LONG_TOKENS), LONG_SHARE)
    stock = [BUILT_IN[name] for name in STOCK]
    with Fleet(here, SLO_CHUNK, stock, False, args.out, asked, say, True) as fleet:
        fcfs, rng = fleet.target(STOCK[0]), random.Random(3)
        lone = {}
        for kind, draw, n in ((SHORT, uniform(*SHORT_TOKENS), 40), (LONG, fixed(LONG_TOKENS), 10)):
            bodies = asked.bodies([Job(0.0, draw(rng)) for _ in range(n)], 3)
            lone[kind] = statistics.median(asyncio.run(client.one_by_one(fcfs, bodies)))
        limit = {kind: SLO_FACTOR * s for kind, s in lone.items()}
        mixed = Told("slo", "", lengths, long_slo_s=limit[LONG])
        capacity = compare.capacity(fcfs, mixed, asked, span_s / 2, 4).requests_per_s
        told = Variant(LAPS, (ON, "--laps-ttft-slo-ms", f"{1e3 * limit[SHORT]:.1f}"))
        fleet.add(told)
        by_kind = compare.Lone((THRESHOLD, THRESHOLD + 1, LONG_TOKENS), (lone[SHORT], lone[LONG], lone[LONG]))
        settings = Settings(args.rounds, span_s, UTILISATION, 100, SLO_FACTOR, LONG_TOKENS)
        names = (*STOCK, LAPS)
        seen = Bench(fleet, names, asked, settings, say).run(mixed, Measured(by_kind, capacity, STOCK[0]))
        status = fit(piece, "mixed open load", fleet, LAPS)
    figures = seen.comparison
    share = {k: {n: [1.0 - s for s in figures.values(n, k, "goodput")] for n in names} for k in KINDS}
    ttft = {k: {n: figures.values(n, k, "p90_ms") for n in names} for k in KINDS}
    best = min(STOCK, key=lambda name: statistics.mean(share[SHORT][name]))
    rows = [
        (n, *(f"{100 * statistics.median(share[k][n]):.1f}%" for k in KINDS),
         *(f"{statistics.median(ttft[k][n]):.0f}" for k in KINDS))
        for n in names
    ]  # fmt: skip
    heads = ("", *(f"{k} in violation" for k in KINDS), *(f"{k} P90 ms" for k in KINDS))
    note = ", ".join(f"SLO of {k} requests {1e3 * v:.0f} ms" for k, v in limit.items())
    rate = UTILISATION * capacity
    piece.tables.append(Table(f"Mixed open load, {rate:.1f} requests/s: SLO violations", heads, rows, note))
    piece.figures.append(
        Figure.of(
            f"short requests in violation, LAPS / {best}, the best of stock",
            ratio(share[SHORT][LAPS], share[SHORT][best]), bars.VIOLATIONS,
        )
    )  # fmt: skip
    piece.data["slo"] = {
        "slo_ms": {k: 1e3 * v for k, v in limit.items()}, "capacity_per_s": capacity, "rate_per_s": rate,
        "violations": share, "ttft_p90_ms": ttft, "window": status["window"],
        "busy_share": statistics.median(seen.busy[LAPS]),
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    p = parser("python -m benchmark.serve.window", __doc__, "window", rounds="at least 5 for a verdict")
    p.add_argument("--quick", action="store_true", help="a third of the load per round, for a quick check")
    p.add_argument("--only", default="", help=f"some of {', '.join(QUESTIONS)}, separated by commas")
    args = p.parse_args(argv)
    wanted = set(filter(None, args.only.split(","))) or set(QUESTIONS)
    if not wanted <= set(QUESTIONS):
        p.error(f"--only takes {', '.join(QUESTIONS)}")
    say = Progress()
    text = (
        "Servers with the dual queue alone, with AWD and with a fixed window, in turns; then deadlines in a mixed "
        f"open load. {args.rounds} rounds."
    )
    piece = Piece("window", "The waiting window, deadlines and the latency model", text, 1)
    with command_line("window"):
        if wanted & {"alone", "closed"}:
            # Token ids in and out: tokenizer processes would compete with the emulating cores.
            here = device(model.DEEP, CHUNK, "--skip-tokenizer-init")
            with Fleet(here, CHUNK, WINDOWS, False, args.out, prompts(), say, True) as fleet:
                if "alone" in wanted:
                    alone(fleet, piece, args)
                if "closed" in wanted:
                    closed(fleet, piece, args)
        if "slo" in wanted:
            slo(piece, args, say)
    piece.leave(args.out, "benchmark.serve.window", argv)
    return 0


if __name__ == "__main__":
    sys.exit(main())
