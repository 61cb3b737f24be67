"""Batches of short prefills from full graphs against SGLang's own prefill graphs, in one run. Needs a GPU.

    python -m benchmark.graphs                     Qwen2.5 shapes with dummy weights
    python -m benchmark.graphs --lengths FILE      prompt lengths from a column of a CSV (may be gzipped)
    python -m benchmark.graphs --shapes 7B --modes breakable graphs --concurrency 1 8 32 128 --prompts lmsys \
        --seconds 4 --rounds 2                     about five minutes on one GPU

A closed loop of N clients on a prefill server per mode; no prompt is ever cached. Modes take turns within a round and
figures are medians over rounds. What one batch takes on each path: ``benchmark.ladder``. Tables go to the terminal, all
of it to the folder of --out.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import gzip
import random
import re
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from laps_plan.traffic.job import THRESHOLD, Job
from laps_plan.traffic.lengths import Sizes, drawn, uniform
from laps_plan.traffic.traces import FOLDER

from benchmark.load import client
from benchmark.load.prompts import Prompts
from benchmark.results import bars, pictures
from benchmark.results.bars import Bar
from benchmark.results.metrics import QUANTILES, quantile
from benchmark.results.piece import Figure, Piece, Table, parser
from benchmark.rig import devices, model
from benchmark.rig.devices import CUDA, DEVICES, MODELS, Device
from benchmark.rig.fleet import Fleet, command_line, get_json
from benchmark.rig.progress import Progress
from benchmark.rig.variants import ON, Variant

CHUNK = 8192
MODES: dict[str, tuple[str, ...]] = {
    **{name: ("--cuda-graph-backend-prefill", name) for name in ("disabled", "breakable", "full")},
    "laps": (ON,),
    "graphs": (ON, "--enable-batch-prefill-cuda-graph"),
}
"""``laps`` is the scheduler without full graphs, so that the contributions of scheduler and graphs can be separated."""
DEFAULT = "breakable"
WEIGHTS_GIB = {"0.5B": 1.0, "7B": 15.3, "14B": 29.6, "32B": 65.5}
SAMPLE = 4000
"""Distinct prompts of a closed loop."""

Point = tuple[str, int, str]
"""Prompts, clients, mode."""


def short_lengths(path: Path) -> list[int]:
    """Return the short prompt lengths (tokens) in a file's first column."""
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    given = [int(row[0]) for row in csv.reader(text.decode().splitlines()) if row and row[0].isdecimal()]
    return [n for n in given if n <= THRESHOLD] or [THRESHOLD]


def device(shape: str, args: argparse.Namespace) -> Device:
    """Return the GPU with another model."""
    base = DEVICES[CUDA]
    flags = [*base.args, "--attention-backend", args.attention, "--mem-fraction-static", "0.7", *args.flags]
    return replace(
        base, args=tuple(flags), chunk=CHUNK, longest=CHUNK, server_gib=1.3 * WEIGHTS_GIB[shape] + 12,
        checkpoint=lambda: model.write_shape(shape, MODELS / f"shape-{shape}"),
    )  # fmt: skip


def status(fleet: Fleet, mode: str) -> dict[str, Any]:
    """Return the ``graphs`` part of /laps_status; empty for a stock server."""
    return dict((get_json(fleet.prefill(mode), "/laps_status") or {}).get("graphs", {}))


def captured(fleet: Fleet, mode: str) -> dict[str, Any]:
    """Return seconds and MiB of a server's prefill capture: of the full graphs if it has any, else of the stock
    graphs."""
    graphs = status(fleet, mode)
    if graphs.get("on"):
        return {k: graphs[k] for k in ("capture_s", "capture_mib", "row_counts", "faster")}
    log = fleet.log(mode).read_text(errors="replace")
    found = re.search(r"target prefill CUDA graph end\. elapsed=([\d.]+) s, mem usage=([-\d.]+) GB", log)
    return {"capture_s": float(found[1]), "capture_mib": float(found[2]) * 1024} if found else {}


def measure(fleet: Fleet, mode: str, sizes: Sizes, clients: int, seconds: float, seed: str) -> dict[str, Any]:
    """Run a closed loop on one mode."""
    target, rng = fleet.target(mode), random.Random(seed)
    jobs = [Job(0.0, sizes(rng)) for _ in range(SAMPLE)]
    before = status(fleet, mode)
    bodies, new = fleet.prompts.bodies(jobs, rng.getrandbits(30)), [job.new for job in jobs]
    loop = asyncio.run(client.closed(target, bodies, clients, seconds, tokens=new))
    after = status(fleet, mode)
    found: dict[str, Any] = {
        "per_s": loop.rate,
        "steady": loop.steady.require(mode).as_dict(),
        "tokens_per_s": sum(loop.steady.tokens_per_s.values()),
        "failed": loop.failed,
        **{f"p{q}_ms": 1e3 * quantile(loop.ttft_s, q) for q in QUANTILES},
    }
    if after.get("on"):
        batches, rows = (after[k] - before[k] for k in ("batches", "rows"))
        found["hit_rate"] = (after["replayed"] - before["replayed"]) / batches if batches else 0.0
        found["padded_share"] = (after["padded_rows"] - before["padded_rows"]) / rows if rows else 0.0
        found["why"] = {k: n - before["why"].get(k, 0) for k, n in after["why"].items()}
    return found


def run(shape: str, args: argparse.Namespace, say: Progress) -> dict[str, Any]:
    """Run all modes of one model shape; return medians over rounds per prompts, clients and mode."""
    here = device(shape, args)
    kinds = {"lmsys": drawn(short_lengths(args.lengths)), "uniform": uniform(1, THRESHOLD)}
    points = [(kind, clients) for kind in args.prompts for clients in args.concurrency]
    prompts = Prompts(here.vocabulary, args.seed, CHUNK, reuse=False, prefill_only=True)
    seen: dict[Point, list[dict[str, Any]]] = {}
    capture: dict[str, dict[str, Any]] = {}
    variants = [Variant(mode, MODES[mode]) for mode in args.modes]
    with Fleet(here, CHUNK, variants, False, args.out / shape, prompts, say) as fleet:
        for i in range(args.rounds):
            order = args.modes if i % 2 == 0 else args.modes[::-1]
            # If memory holds one server at a time, each runs its whole round while it is up.
            outer = [order] if fleet.together else [[mode] for mode in order]
            for modes in outer:
                for mode in modes:
                    measure(fleet, mode, kinds["uniform"], max(args.concurrency), args.warm, f"warm {args.seed}")
                    capture[mode] = captured(fleet, mode)
                for kind, clients in points:
                    for mode in modes:
                        say(f"{shape}: round {i + 1} of {args.rounds}, {kind} prompts, {clients} clients, {mode}")
                        # The same prompts for every mode.
                        seed = f"{kind} {clients} {i} {args.seed}"
                        one = measure(fleet, mode, kinds[kind], clients, args.seconds, seed)
                        seen.setdefault((kind, clients, mode), []).append(one)
    return {"shape": shape, "capture": capture, "rows": [row(point, rounds) for point, rounds in seen.items()]}


def row(point: Point, rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return medians over rounds."""
    kind, clients, mode = point
    numbers = [key for key in rounds[0] if key not in ("failed", "why")]
    return {
        "prompts": kind, "clients": clients, "mode": mode,
        **{key: round(statistics.median(r[key] for r in rounds), 4) for key in numbers},
        "failed": sum(r["failed"] for r in rounds), "why": rounds[-1].get("why"),
    }  # fmt: skip


COLUMNS = (
    "prompts", "clients", "mode", "per_s", "tokens_per_s", "p50_ms", "p90_ms", "p99_ms", "hit_rate", "padded_share",
    "failed",
)  # fmt: skip


def table(result: dict[str, Any]) -> Table:
    """Return a table of all figures of one shape; medians over rounds."""
    cells = [["-" if row.get(c) is None else str(row[c]) for c in COLUMNS] for row in result["rows"]]
    return Table(f"Short prompts, {result['shape']}", [c.replace("_", " ") for c in COLUMNS], cells)


def figures(result: dict[str, Any]) -> list[Figure]:
    """Return the full graphs' figures with bars, for one shape."""
    at = {(r["prompts"], r["clients"], r["mode"]): r for r in result["rows"]}
    ratios = {
        (kind, clients): row["per_s"] / at[kind, clients, DEFAULT]["per_s"]
        for (kind, clients, mode), row in at.items()
        if mode == "graphs" and (kind, clients, DEFAULT) in at and at[kind, clients, DEFAULT]["per_s"]
    }
    wanted: list[tuple[str, float | None, Bar]] = []
    if ratios:
        told = "requests/s, graphs / {}, {} prompts, {} clients"
        for pick, bar in ((min, bars.GRAPHS_WORST), (max, bars.GRAPHS_BEST)):
            point = pick(ratios, key=ratios.__getitem__)
            wanted.append((told.format(DEFAULT, *point), ratios[point], bar))
    padded = at.get(("lmsys", 32, "graphs"), {}).get("padded_share")
    capture = result["capture"].get("graphs") or {}
    wanted += [
        ("padded share at 32 clients, LMSYS lengths", padded, bars.PADDED),
        ("capture (s)", capture.get("capture_s"), bars.CAPTURE_S),
        ("capture (MiB)", capture.get("capture_mib"), bars.CAPTURE_MIB),
    ]
    return [Figure.of(f"{result['shape']}: {what}", v, bar) for what, v, bar in wanted if v is not None]


def picture(result: dict[str, Any], args: argparse.Namespace, path: Path) -> None:
    """Draw requests/s and P99 over the number of clients, for each kind of prompts."""
    at = {(r["prompts"], r["clients"], r["mode"]): r for r in result["rows"]}
    panels = {
        f"{kind} prompts: {what}": {m: [at[kind, n, m][key] for n in args.concurrency] for m in args.modes}
        for kind in args.prompts
        for key, what in (("per_s", "requests/s"), ("p99_ms", "TTFT P99 (ms)"))
    }
    pictures.lines(args.concurrency, panels, "clients", path, title=result["shape"])


def main(argv: Sequence[str] | None = None) -> int:
    p = parser("./run bench graphs", __doc__, "graphs", seed=0, rounds="(3)", seconds=8.0, whole=True)
    p.set_defaults(rounds=3)
    p.add_argument("--shapes", nargs="+", default=list(WEIGHTS_GIB), choices=list(WEIGHTS_GIB))
    p.add_argument("--modes", nargs="+", default=list(MODES), choices=list(MODES))
    p.add_argument("--concurrency", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32, 64, 128])
    p.add_argument("--prompts", nargs="+", default=["lmsys", "uniform"], choices=["lmsys", "uniform"])
    trace = FOLDER / "lmsys_lengths.csv.gz"
    p.add_argument("--lengths", type=Path, default=trace, help="prompt lengths, first column of a CSV")
    p.add_argument("--warm", type=float, default=10.0, help="warm-up load of each server in a round (seconds)")
    p.add_argument("--attention", default="fa3", help="attention backend")
    p.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="more server options; last")
    args = p.parse_args(argv)
    if not devices.has_cuda():
        raise SystemExit("Nothing was measured: CUDA graphs need a GPU, and there is none here.")
    text = (
        "Batches of short prefills from full graphs against SGLang's own prefill graphs, dummy weights of Qwen2.5 "
        f"shapes; lengths: {args.lengths.name}."
    )
    piece = Piece("graphs", "Full graphs for short prefills", text, args.seed, data={"results": []})
    with command_line("bench graphs"):
        for shape in args.shapes:
            result = run(shape, args, Progress())
            piece.tables.append(table(result))
            piece.figures += figures(result)
            piece.data["results"].append(result)
            picture(result, args, args.out / f"{shape}.svg")
            piece.pictures[f"{shape}.svg"] = f"{shape}: requests/s and P99 TTFT over clients, by prefill graphs."
            # After each shape: an interrupted run keeps its results so far.
            piece.leave(args.out, "benchmark.graphs", argv)
    return 0


if __name__ == "__main__":
    sys.exit(main())
