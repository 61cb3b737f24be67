"""A real GPU beside the simulator: the arrivals of the report's gpu-* pieces, with AIConfigurator's unchanged profile.

python -m benchmark.fidelity.gpu [--from benchmark/report]
"""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from laps_plan.traffic import named

from benchmark.fidelity.compare import MEAN, Simulator, quantiles
from benchmark.gpu.latency import CHUNK, of_this_gpu
from benchmark.results import Column, Command, Comparison, Figure, Namespace, Parser, Piece, Table, ttft_paths
from benchmark.rig import LAPS
from benchmark.serve.command import LONG_CHUNKS
from benchmark.serve.compare import Lone

LONGEST = 16384
WORKLOADS = ("mixed", "azure", "code")
PATHS = {**ttft_paths(50, 90), MEAN: ("mean_ms",)}
"""Compared figures, and their paths in a piece's data (ms)."""
COLUMNS = tuple(Column(key, (key,)) for key in PATHS)


def measured(data: Mapping[str, Any]) -> Comparison:
    """Return the measured figures of all policies (ms) from the data of a piece."""
    pooled = Comparison({policy: [of] for policy, of in data["pooled"].items()})
    return Comparison({p: [{key: pooled.median(p, *path) for key, path in PATHS.items()}] for p in pooled.rounds})


def simulated(data: Mapping[str, Any], workload: str, policy: str, simulator: Simulator) -> dict[str, float]:
    """Return the simulated figures of a policy (ms) for the arrivals of a piece."""
    settings, seen = data["settings"], data["measured"]
    lone = Lone(tuple(map(int, seen["lone_ttft_s"])), tuple(seen["lone_ttft_s"].values()))
    offered = named.Offer(settings["utilisation"], settings["span_s"], seen["capacity_per_s"], lone)
    asked = named.make(workload, named.Scale(LONGEST, min(LONGEST, LONG_CHUNKS * CHUNK)))
    new, ttft = list[int](), list[float]()
    for i in range(settings["rounds"]):
        jobs = asked.arrivals(offered, random.Random(settings["seed"] * 1000 + i))
        record = simulator.run(policy, jobs, i).record
        new += record.new
        ttft += record.ttft
    return {key: 1e3 * s for key, s in (quantiles(new, ttft) | {MEAN: statistics.fmean(ttft)}).items()}


def options(p: Parser) -> None:
    p.add_argument("--from", dest="source", type=Path, default=Path("benchmark/report"), help="folder of the pieces")


def measure(args: Namespace) -> Piece:
    tables, figures, data = list[Table](), list[Figure](), dict[str, Any]()
    for workload in WORKLOADS:
        piece = Piece.read(args.source / f"gpu-{workload}.json")
        simulator, real = Simulator(of_this_gpu(str(piece.machine.get("gpus", ""))), CHUNK), measured(piece.data)
        said = Comparison({p: [simulated(piece.data, workload, p, simulator)] for p in real.rounds})
        data[workload] = {p: {"gpu": real.rounds[p][0], "simulated": said.rounds[p][0]} for p in real.rounds}
        tables.append(real.table(workload, "policy", COLUMNS, "ms: of the GPU / simulated.", beside=said))
        for at, seen in (("gpu", real), ("simulated", said)):
            best = seen.best((p for p in seen.rounds if p != LAPS), MEAN)
            assert best is not None
            name = f"{workload}: mean TTFT, {LAPS} over the best of stock, {at}"
            figures.append(Figure(name, seen.ratio(LAPS, best, MEAN).median))
    text = (
        "The same arrivals on a GPU and in the simulator, whose profile says how long kernels take and assumes the "
        "host's times."
    )
    return Piece("sim-gpu", "A real GPU beside the simulator", text, 0, tables, figures, data=data)


COMMAND = Command("benchmark.fidelity.gpu", __doc__, measure, options, out="sim-gpu")

if __name__ == "__main__":
    sys.exit(COMMAND.main())
