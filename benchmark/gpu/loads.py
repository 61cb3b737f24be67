"""Does the plugin load and serve here? With which attention backends, prefill graphs, and both of SGLang's loops."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from laps_plan.traffic.job import Job

from benchmark.load import client
from benchmark.load.prompts import Prompts
from benchmark.results.bars import Bar
from benchmark.results.piece import Figure, Piece, Table
from benchmark.rig.devices import Device
from benchmark.rig.fleet import Fleet, get_json
from benchmark.rig.progress import Progress
from benchmark.rig.servers import ServerError
from benchmark.rig.variants import ON, Variant

START_S = 200.0
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


def loads(device: Device, prompts: Prompts, out: Path, seed: int, say: Progress, *, cuda: bool) -> tuple[Piece, Path]:
    """Start a server each way; return what it says of itself and how long it took. One that does not start fails the
    piece's bar, not the piece."""
    rows: list[Sequence[str]] = []
    told: dict[str, Any] = {}
    for name, args in (HOW if cuda else ELSEWHERE).items():
        begin = time.monotonic()
        one = replace(device, start_s=START_S)
        variant = Variant(name.replace(" ", "-"), (ON, *args))
        try:
            with Fleet(one, device.chunk, [variant], False, out, prompts, say, True) as fleet:
                target = fleet.target(variant.name)
                bodies = prompts.bodies([Job(0.0, n) for n in LENGTHS], seed)
                took = asyncio.run(client.one_by_one(target, bodies))
                status = get_json(target, "/laps_status") or {}
                info = get_json(target, "/server_info") or {}
        except (ServerError, ConnectionError) as e:
            told[name] = {"error": str(e)}
            rows.append((name, "-", "-", "-", "-", str(e)[:80]))
            continue
        up_s = time.monotonic() - begin
        overlap = not info.get("disable_overlap_schedule", True)
        told[name] = {"laps_status": status, "overlap": overlap, "ttft_s": took, "up_s": up_s}
        cut, graphs = status.get("slices", {}), status.get("graphs", {})
        on = "on" if status.get("enabled") else f"off: {status.get('reason')}"
        sliced = "on" if cut.get("on") else str(cut.get("why_not"))
        captured = f"{graphs.get('capture_s', 0.0):.1f} s" if GRAPHS in args else "-"
        rows.append((name, on, "on" if overlap else "off", sliced, captured, f"{up_s:.0f} s"))
    serve = [bool(t.get("laps_status", {}).get("enabled")) for t in told.values()]
    figures = [Figure.of("ways to start in which LAPS serves, of all", sum(serve) / len(serve), Bar(least=1.0))]
    heads = ("server", "LAPS", "overlap loop", "slices", "graphs captured in", "up after")
    text = f"{device.what}; a server with LAPS, started in each of these ways, answers {len(LENGTHS)} requests."
    piece = Piece(
        "loads", "The plugin on this machine", text, seed, [Table("Servers", heads, rows)], figures, data=told
    )
    return piece, out
