"""All GPU measurements in one go: real prefill servers of all variants, loaded in turns, within a few minutes.

    python -m benchmark.serve.gpu [--minutes 15] [--workload mixed,code,azure] [--out out/gpu]

First checks that every server answers, and records the status of the LAPS ones. Then runs ``slices`` and workloads of
``serve`` on the same servers; each piece is written as soon as it is done. Workloads that would not be done in time are
not begun.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from laps_plan.traffic.job import Job

from benchmark.load import client
from benchmark.load.prompts import Prompts
from benchmark.results.bars import LONE as LONE_BAR
from benchmark.results.bars import Bar
from benchmark.results.metrics import quantile
from benchmark.results.piece import Figure, Piece, Table, parser
from benchmark.results.rounds import in_turns
from benchmark.rig import devices
from benchmark.rig.devices import Device
from benchmark.rig.fleet import Fleet, command_line, get_json
from benchmark.rig.progress import Progress
from benchmark.rig.variants import BUILT_IN, FCFS, LAPS, SPF
from benchmark.serve import command as serve
from benchmark.serve import slices

NAMES = (FCFS, SPF, LAPS)
LONE, LONE_ROUNDS = 20, 21
SERVE_S = 170.0
"""Time of one workload with its calibration, about."""


def loads(fleet: Fleet, started_s: float, args: argparse.Namespace) -> Piece:
    """Return a piece with the servers' status after their start."""
    rows: list[Sequence[str]] = []
    told: dict[str, Any] = {}
    for variant in fleet.variants:
        target = fleet.prefill(variant.name)
        status = get_json(target, "/laps_status") or {}
        info = get_json(target, "/server_info") or {}
        overlap = not info.get("disable_overlap_schedule", True)
        told[variant.name] = {"laps_status": status, "overlap": overlap}
        on = bool(status.get("enabled"))
        cut = status.get("slices", {})
        why = cut.get("why_not") or ("" if on else "stock")
        rows.append((variant.name, "on" if overlap else "off", "on" if on else "-", "on" if cut.get("on") else why))
    laps = told[LAPS]
    loaded = bool(laps["laps_status"].get("enabled")) and laps["overlap"]
    figures = [
        Figure.of("LAPS serves with the overlap loop (1 = yes)", float(loaded), Bar(least=1.0)),
        Figure("all servers up (s)", started_s),
    ]
    table = Table("Servers", ("variant", "overlap loop", "LAPS", "slices"), rows)
    text = f"{fleet.device.what}, chunks of {fleet.chunk} tokens, one device for all servers."
    return Piece("gpu-loads", "The plugin on this device", text, args.seed, [table], figures, data=told)


def lone(fleet: Fleet, prompts: Prompts, args: argparse.Namespace, names: Sequence[str]) -> Piece:
    """Measure a short request alone, the servers in turns of a few requests: LAPS's overhead without contention."""

    def once(i: int, name: str) -> list[float]:
        bodies = prompts.bodies([Job(0.0, slices.SHORT_TOKENS)] * (LONE + 1), args.seed * 7000 + i)
        return asyncio.run(client.one_by_one(fleet.target(name), bodies))[1:]

    seen = in_turns(names, LONE_ROUNDS, once, lambda _: None)
    figures = [
        Figure.of(f"TTFT of a short request alone, {name} / {FCFS}", slices.over(seen[name], seen[FCFS]), LONE_BAR)
        for name in names
        if name != FCFS
    ]
    rows: list[Sequence[str]] = [
        (name, *(f"{quantile(slices.flat_ms(of), q):.2f}" for q in (10, 50, 90))) for name, of in seen.items()
    ]
    heads, note = ("variant", "P10", "P50", "P90"), f"TTFT in ms; {slices.SHORT_TOKENS} tokens, one request at a time."
    text = f"{fleet.device.what}; {LONE_ROUNDS} rounds of {LONE} requests, the servers in turns."
    tables = [Table("Alone", heads, rows, note)]
    return Piece("gpu-lone", "A short request alone", text, args.seed, tables, figures, data={"ttft_s": seen})


def main(argv: Sequence[str] | None = None) -> int:
    p = parser("python -m benchmark.serve.gpu", __doc__, "gpu", rounds="(5)", seed=1, seconds=8.0, whole=True)
    p.add_argument("--minutes", type=float, default=15.0, help="total time, the servers' start included (15)")
    p.add_argument("--workload", default="mixed,code,azure", help="workloads of benchmark.serve (mixed,code,azure)")
    p.add_argument("--skip-slices", action="store_true")
    p.add_argument("--chunk", type=int, default=8192, help="--chunked-prefill-size, tokens (8192)")
    p.add_argument("--longest", type=int, default=16384, help="longest prompt, tokens (16384)")
    p.add_argument("--utilisation", type=float, default=0.6)
    devices.add_device(p)
    args = p.parse_args(argv)
    args.tokens, begin = args.chunk, time.monotonic()
    say = Progress()
    device: Device = args.device
    prompts = Prompts(device.vocabulary, args.seed, args.longest, reuse=False, prefill_only=True)
    found = [BUILT_IN[n] for n in NAMES]

    def done(piece: Piece, left: Path | None = None) -> None:
        """``left``: the folder of its pictures."""
        if not piece.name.startswith("gpu-"):
            piece.name, piece.title = f"gpu-{piece.name}", f"{piece.title}, on a GPU"
        out = args.out / piece.name
        piece.leave(out, "benchmark.serve.gpu", argv)
        for picture in piece.pictures:
            shutil.copy((left or out) / picture, out)

    with command_line("gpu"), Fleet(device, args.chunk, found, False, args.out, prompts, say, True) as fleet:
        done(loads(fleet, time.monotonic() - begin, args))
        done(lone(fleet, prompts, args, NAMES))
        if not args.skip_slices:
            done(slices.piece_of(slices.measure(fleet, slices.NAMES, prompts, args, say, meet=True), device, args))
        for name in args.workload.split(","):
            if time.monotonic() - begin + SERVE_S > 60.0 * args.minutes:
                say(f"no time is left for {name}")
                continue
            words = ["--workload", name, "--variants", ",".join(NAMES), "--rounds", str(args.rounds)]
            words += ["--seconds", str(args.seconds), "--utilisation", str(args.utilisation), "--device", device.name]
            words += ["--seed", str(args.seed), "--chunk", str(args.chunk), "--longest", str(args.longest)]
            words += ["--out", str(args.out / "serve" / name)]
            for piece, left in serve.compared(serve.checked(words), say, fleet):
                done(piece, left)
        last = {LAPS: get_json(fleet.prefill(LAPS), "/laps_status")}
        (args.out / "laps_status.json").write_text(json.dumps(last, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
