"""Checks whether the plugin loads and serves with each attention backend, prefill graph and event loop; its cost for a
lone short request; and the gain of full graphs."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from laps_plan.traffic.job import Job

from benchmark.load import Prompts, client
from benchmark.results import Bar, Column, Figure, Piece, Table, bars, ratio, take_turns
from benchmark.rig import FCFS, LAPS, ON, Device, Fleet, Progress, ServerError, Variant, get_json, variants
from benchmark.serve import slices

START_S = 200.0
REQUESTS, ROUNDS = 20, 21
"""Lone requests of a round, and number of rounds."""
LENGTHS = (1, 64, 256, 1024)
GRAPHS = "--enable-batch-prefill-cuda-graph"
HOW = {
    "fa3": ("--attention-backend", "fa3"),
    "flashinfer": ("--attention-backend", "flashinfer"),
    "full graphs": ("--attention-backend", "fa3", GRAPHS),
    "no graphs": ("--attention-backend", "fa3", "--cuda-graph-backend-prefill", "disabled"),
    "overlap loop off": ("--attention-backend", "fa3", "--disable-overlap-schedule"),
}
"""Ways to start a server on a GPU."""
ELSEWHERE: dict[str, tuple[str, ...]] = {"overlap loop": (), "overlap loop off": ("--disable-overlap-schedule",)}


def loads(device: Device, prompts: Prompts, out: Path, seed: int, say: Progress, *, cuda: bool) -> Piece:
    """Start a server in each way; return a piece with its status and start time. If a server does not start, the piece
    misses its bar but is still made."""
    rows: list[Sequence[str]] = []
    told: dict[str, Any] = {}
    for name, args in (HOW if cuda else ELSEWHERE).items():
        begin, variant = time.monotonic(), Variant(name.replace(" ", "-"), (ON, *args))
        try:
            with Fleet(replace(device, start_s=START_S), [variant], prompts, out, say, together=True) as fleet:
                target = fleet.target(variant.name)
                took = asyncio.run(client.one_by_one(target, prompts.bodies([Job(0.0, n) for n in LENGTHS], seed)))
                status, info = (get_json(target, path) or {} for path in ("/laps_status", "/server_info"))
        except (ServerError, ConnectionError) as e:
            told[name] = {"error": str(e)}
            rows.append((name, "-", "-", "-", "-", str(e)[:80]))
            continue
        up_s, overlap = time.monotonic() - begin, not info.get("disable_overlap_schedule", True)
        told[name] = {"laps_status": status, "overlap": overlap, "ttft_s": took, "up_s": up_s}
        cut, graphs = status.get("slices", {}), status.get("graphs", {})
        on = "on" if status.get("enabled") else f"off: {status.get('reason')}"
        sliced = "on" if cut.get("on") else str(cut.get("why_not"))
        captured = f"{graphs.get('capture_s', 0.0):.1f} s" if GRAPHS in args else "-"
        rows.append((name, on, "on" if overlap else "off", sliced, captured, f"{up_s:.0f} s"))
    serve = [bool(t.get("laps_status", {}).get("enabled")) for t in told.values()]
    heads = ("server", "LAPS", "overlap loop", "slices", "graphs captured in", "up after")
    text = f"{device.what}; a server with LAPS, started in each of these ways, answers {len(LENGTHS)} requests."
    piece = Piece("loads", "The plugin on this machine", text, seed, [Table("Servers", heads, rows)], data=told)
    piece.judge("ways to start in which LAPS serves, of all", sum(serve) / len(serve), Bar(least=1.0))
    return piece


def lone(fleet: Fleet, names: Sequence[str], seed: int, rounds: int = ROUNDS) -> Piece:
    """Measure lone short requests, the servers in turns of REQUESTS requests. Raises ConnectionError."""

    def once(i: int, name: str) -> slices.Round:
        bodies = fleet.prompts.bodies([Job(0.0, slices.SHORT_TOKENS)] * (REQUESTS + 1), seed * 7000 + i)
        return {"ttft_s": asyncio.run(client.one_by_one(fleet.target(name), bodies))[1:]}

    seen = take_turns(names, rounds, once, lambda _: None)
    medians = slices.each(statistics.median, seen)
    figures = [
        medians.figure(f"TTFT of a short request alone, {name} / {FCFS}", name, FCFS, ("ttft_s",), bars.LONE)
        for name in names
        if name != FCFS
    ]
    note = f"TTFT in ms; {slices.SHORT_TOKENS} tokens, one request at a time."
    text = f"{fleet.device.what}; {rounds} rounds of {REQUESTS} requests, the servers in turns."
    columns = [Column(f"P{q}", ("ttft_s", f"p{q}"), ".2f") for q in (10, 50, 90)]
    table = slices.pooled_ms(seen).table("Alone", "variant", columns, note)
    status = get_json(fleet.prefill(LAPS), "/laps_status")
    data = {"ttft_s": {name: [one["ttft_s"] for one in of] for name, of in seen.items()}, "laps_status": status}
    return Piece("lone", "A short request alone", text, seed, [table], figures, data=data)


def graph_figures(points: dict[str, Any], graphs: dict[str, Any]) -> list[Figure]:
    """Return figures of full graphs for short prompts, against SGLang's own graphs in closed loops. ``points``: clients
    -> variant -> figures of each round; ``graphs``: part of /laps_status."""
    key, found = "requests_per_s", []
    over = {n: ratio(of[variants.GRAPHS][key], of[FCFS][key]) for n, of in points.items()}
    for pick, bar in ((min, bars.GRAPHS_WORST), (max, bars.GRAPHS_BEST)):
        clients = pick(over, key=lambda n: over[n].median)
        found.append(Figure.of(f"requests/s, {variants.GRAPHS} / {FCFS}, {clients} clients", over[clients], bar))
    for name, words, bar in (
        ("padded_share", "padded share of rows", bars.PADDED),
        ("capture_s", "capture (s)", bars.CAPTURE_S),
        ("capture_mib", "capture (MiB)", bars.CAPTURE_MIB),
    ):
        if name in graphs:
            found.append(Figure.of(words, graphs[name], bar))
    return found
