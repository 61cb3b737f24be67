"""Batches of short prompts from full graphs against SGLang's own prefill graphs, in one run. Needs a GPU.

    ./run bench graphs [--concurrency 1 8 32 128] [--seconds 4] [--rounds 2]

The closed loops of ``benchmark.serve`` with LMSYS lengths of up to 256 tokens. "laps" is the scheduler without full
graphs, so that the contributions of scheduler and graphs can be separated. What one batch takes on each path:
``benchmark.ladder``.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from typing import Any

from laps_plan.traffic.job import THRESHOLD

from benchmark.load.prompts import Prompts
from benchmark.results import Command, Figure, Parser, Piece, bars, count, ratio
from benchmark.rig import devices
from benchmark.rig.fleet import Fleet, get_json
from benchmark.rig.variants import LAPS, ON, Variant
from benchmark.serve import command as serve

CHUNK = 8192
DEFAULT, GRAPHS = "breakable", "graphs"
MODES = (
    *(Variant(name, ("--cuda-graph-backend-prefill", name)) for name in ("disabled", DEFAULT, "full")),
    Variant(LAPS, (ON,)),
    Variant(GRAPHS, (ON, "--enable-batch-prefill-cuda-graph")),
)


def figures(points: dict[str, Any], graphs: dict[str, Any]) -> list[Figure]:
    """Return the full graphs' figures with bars. ``points``: clients -> mode -> figures of each round; ``graphs``: part
    of /laps_status."""
    key, found = "requests_per_s", []
    over = {n: ratio(of[GRAPHS][key], of[DEFAULT][key]) for n, of in points.items()}
    for pick, bar in ((min, bars.GRAPHS_WORST), (max, bars.GRAPHS_BEST)):
        clients = pick(over, key=lambda n: over[n].median)
        found.append(Figure.of(f"requests/s, {GRAPHS} / {DEFAULT}, {clients} clients", over[clients], bar))
    for name, words, bar in (
        ("padded_share", "padded share of rows", bars.PADDED),
        ("capture_s", "capture (s)", bars.CAPTURE_S),
        ("capture_mib", "capture (MiB)", bars.CAPTURE_MIB),
    ):
        if name in graphs:
            found.append(Figure.of(words, graphs[name], bar))
    return found


def options(p: Parser) -> None:
    """Add the options of this command."""
    p.add_argument("--concurrency", type=count, nargs="+", default=list(serve.CLIENTS), help="clients (1 to 128)")


def check(_: argparse.Namespace) -> None:
    """Raise SystemExit without a GPU."""
    if not devices.has_cuda():
        raise SystemExit("Nothing was measured: CUDA graphs need a GPU, and there is none here.")


def run(args: argparse.Namespace) -> Piece:
    """Run the closed loops of all modes."""
    words = ["--workload", "closed", "--device", devices.CUDA, "--chunk", str(CHUNK), "--out", str(args.out)]
    words += ["--rounds", str(args.rounds), "--seconds", str(args.seconds), "--seed", str(args.seed)]
    asked = serve.COMMAND.parse([*words, "--concurrency", *map(str, args.concurrency)])
    device = replace(asked.device, longest=CHUNK)
    asked.variants, asked.against, asked.device = MODES, DEFAULT, replace(device, longest=THRESHOLD)
    prompts = Prompts(device.vocabulary, args.seed, CHUNK)
    with Fleet(device, MODES, prompts, args.out, args.say) as fleet:
        ((piece, _),) = serve.compared(asked, fleet)
        fleet.target(GRAPHS)
        graphs = dict((get_json(fleet.prefill(GRAPHS), "/laps_status") or {}).get("graphs", {}))
    piece.name, piece.title = "graphs", "Full graphs for short prefills"
    piece.figures = [*figures(piece.data["points"], graphs), *piece.figures]
    piece.data["graphs"] = graphs
    return piece


COMMAND = Command("./run bench graphs", __doc__, run, options, check, out="graphs", rounds=3, seed=1, seconds=8.0)

if __name__ == "__main__":
    sys.exit(COMMAND.main())
