"""Batches of short prompts from full graphs against SGLang's own prefill graphs, in one run. Needs a GPU.

    python -m benchmark.serve.graphs [--concurrency 1 8 32 128] [--seconds 4] [--rounds 2]

The closed loops of ``benchmark.serve`` with LMSYS lengths of up to 256 tokens. "laps" is the scheduler without full
graphs, so that the contributions of scheduler and graphs can be separated. What one batch takes on each path:
``benchmark.ladder``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from laps_plan.traffic.job import THRESHOLD

from benchmark.load.prompts import Prompts
from benchmark.results import bars
from benchmark.results.piece import Figure, Piece, count, parser
from benchmark.results.rounds import ratio
from benchmark.rig import devices
from benchmark.rig.fleet import Fleet, command_line, get_json
from benchmark.rig.progress import Progress
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


def run(args: argparse.Namespace) -> Piece:
    """Run the closed loops of all modes."""
    words = ["--workload", "closed", "--device", devices.CUDA, "--chunk", str(CHUNK), "--out", str(args.out)]
    words += ["--rounds", str(args.rounds), "--seconds", str(args.seconds), "--seed", str(args.seed)]
    asked = serve.checked([*words, "--concurrency", *map(str, args.concurrency)])
    asked.variants, asked.against, asked.longest = MODES, DEFAULT, THRESHOLD
    device, say = replace(asked.device, longest=CHUNK), Progress()
    prompts = Prompts(device.vocabulary, args.seed, CHUNK, reuse=False, prefill_only=True)
    with Fleet(device, CHUNK, MODES, False, args.out, prompts, say) as fleet:
        ((piece, _),) = serve.compared(asked, say, fleet)
        fleet.target(GRAPHS)
        graphs = dict((get_json(fleet.prefill(GRAPHS), "/laps_status") or {}).get("graphs", {}))
    piece.name, piece.title = "graphs", "Full graphs for short prefills"
    piece.figures = [*figures(piece.data["points"], graphs), *piece.figures]
    piece.data["graphs"] = graphs
    return piece


def main(argv: Sequence[str] | None = None) -> int:
    p = parser("./run bench graphs", __doc__, "graphs", seed=1, rounds="(3)", seconds=8.0, whole=True)
    p.set_defaults(rounds=3)
    p.add_argument("--concurrency", type=count, nargs="+", default=list(serve.CLIENTS), help="clients (1 to 128)")
    args = p.parse_args(argv)
    if not devices.has_cuda():
        raise SystemExit("Nothing was measured: CUDA graphs need a GPU, and there is none here.")
    with command_line("bench graphs"):
        piece = run(args)
    piece.leave(args.out, "benchmark.serve.graphs", argv)
    return 0


if __name__ == "__main__":
    sys.exit(main())
