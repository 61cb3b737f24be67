"""Figures of the benchmark of full graphs."""

from __future__ import annotations

from benchmark.gpu.loads import graph_figures
from benchmark.rig import FCFS, GRAPHS


def rates(graph: float) -> dict[str, dict[str, list[float]]]:
    return {GRAPHS: {"requests_per_s": [graph] * 3}, FCFS: {"requests_per_s": [10.0] * 3}}


def test_graph_figures_cover_worst_load_best_load_and_capture() -> None:
    points = {"1": rates(9.0), "8": rates(12.0), "32": rates(11.0)}
    found = graph_figures(points, {"padded_share": 0.3, "capture_s": 20.0, "capture_mib": 500.0})
    assert [(f.name, f.value, f.met) for f in found] == [
        ("requests/s, laps-graphs / fcfs, 1 clients", 0.9, False),
        ("requests/s, laps-graphs / fcfs, 8 clients", 1.2, True),
        ("padded share of rows", 0.3, False),
        ("capture (s)", 20.0, True),
        ("capture (MiB)", 500.0, True),
    ]
    assert len(graph_figures(points, {})) == 2
