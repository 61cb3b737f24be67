"""A real GPU beside the simulator: the arrivals of the report's gpu-* pieces, with AIConfigurator's unchanged profile.

python -m benchmark.fidelity.gpu [--from benchmark/report]
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from laps_plan.profile import Profile
from laps_plan.traffic import named

from benchmark.fidelity.compare import MEAN, Simulator, quantiles
from benchmark.gpu.latency import CHUNK, of_this_gpu
from benchmark.results import Command, Figure, Namespace, Parser, Piece, Table
from benchmark.rig import LAPS
from benchmark.serve.command import LONG_CHUNKS

LONGEST = 16384
WORKLOADS = ("mixed", "azure", "code")
KEYS = {"short P50": ("short", "p50_ms"), "short P90": ("short", "p90_ms"), "long P50": ("long", "p50_ms"),
        "long P90": ("long", "p90_ms"), MEAN: ("mean_ms",)}  # fmt: skip
"""Figures, and their paths in a piece's data (ms)."""
Figures = dict[str, float]
"""Figure -> milliseconds."""


def shown(data: Mapping[str, Any], policy: str) -> Figures:
    """Return the measured figures of a policy from the data of a piece."""
    found = {}
    for key, path in KEYS.items():
        value: Any = data["pooled"][policy]
        for name in path:
            value = value[name]
        found[key] = float(value)
    return found


def simulated(data: Mapping[str, Any], workload: str, policy: str, simulator: Simulator) -> Figures:
    """Return the simulated figures of a policy for the arrivals of a piece."""
    settings, lone = data["settings"], data["measured"]["lone_ttft_s"]
    tokens, seconds = [int(n) for n in lone], list(lone.values())
    offered = named.Offer(
        settings["utilisation"], settings["span_s"], data["measured"]["capacity_per_s"],
        lambda new: float(np.interp(new, tokens, seconds)),
    )  # fmt: skip
    asked = named.make(workload, named.Scale(LONGEST, min(LONGEST, LONG_CHUNKS * CHUNK)))
    new, ttft = list[int](), list[float]()
    for i in range(settings["rounds"]):
        jobs = asked.arrivals(offered, random.Random(settings["seed"] * 1000 + i))
        record = simulator.run(policy, jobs, i).record
        new += record.new
        ttft += record.ttft
    return {key: 1e3 * s for key, s in (quantiles(new, ttft) | {MEAN: float(np.mean(ttft))}).items()}


def compared(folder: Path) -> Iterator[tuple[str, str, Figures, Figures]]:
    """Yield workload, policy, measured and simulated figures. Raises OSError, ValueError if a piece is missing."""
    for workload in WORKLOADS:
        piece = Piece.read(folder / f"gpu-{workload}.json")
        profile = Profile.find(of_this_gpu(str((piece.machine or {}).get("gpus", ""))))
        assert profile is not None, "a profile that comes with laps-plan"
        simulator = Simulator(profile, CHUNK)
        for policy in piece.data["pooled"]:
            said = simulated(piece.data, workload, policy, simulator)
            yield workload, policy, shown(piece.data, policy), said


def options(p: Parser) -> None:
    """Add the options of this command."""
    p.add_argument("--from", dest="source", type=Path, default=Path("benchmark/report"), help="folder of the pieces")


def measure(args: Namespace) -> Piece:
    """Return the piece."""
    tables, figures, data = list[Table](), list[Figure](), dict[str, Any]()
    for workload, policy, real, said in compared(args.source):
        data.setdefault(workload, {})[policy] = {"gpu": real, "simulated": said}
    for workload, policies in data.items():
        rows = [
            (policy, *(f"{of['gpu'][key]:.0f} {of['simulated'][key]:.0f}" for key in KEYS))
            for policy, of in policies.items()
        ]
        tables.append(Table(workload, ("policy", *KEYS), rows, "ms: of the GPU, and simulated."))
        best = {at: min(of[at][MEAN] for name, of in policies.items() if name != LAPS) for at in ("gpu", "simulated")}
        ratios = {at: policies[LAPS][at][MEAN] / best[at] for at in best}
        figures += [
            Figure(f"{workload}: mean TTFT, {LAPS} over the best of stock, {at}", r) for at, r in ratios.items()
        ]
    text = (
        "The same arrivals on a GPU and in the simulator, whose profile says how long kernels take and assumes the "
        "host's times."
    )
    return Piece("sim-gpu", "A real GPU beside the simulator", text, 0, tables, figures, data=data)


COMMAND = Command("benchmark.fidelity.gpu", __doc__, measure, options, out="sim-gpu")
main = COMMAND.main

if __name__ == "__main__":
    sys.exit(main())
