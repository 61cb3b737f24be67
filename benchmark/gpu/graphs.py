"""Figures of full graphs for batches of short prompts, against SGLang's own prefill graphs in closed loops."""

from __future__ import annotations

from typing import Any

from benchmark.results import Figure, bars, ratio
from benchmark.rig import FCFS, GRAPHS


def figures(points: dict[str, Any], graphs: dict[str, Any]) -> list[Figure]:
    """Return figures with bars. ``points``: clients -> variant -> figures of each round; ``graphs``: part of
    /laps_status."""
    key, found = "requests_per_s", []
    over = {n: ratio(of[GRAPHS][key], of[FCFS][key]) for n, of in points.items()}
    for pick, bar in ((min, bars.GRAPHS_WORST), (max, bars.GRAPHS_BEST)):
        clients = pick(over, key=lambda n: over[n].median)
        found.append(Figure.of(f"requests/s, {GRAPHS} / {FCFS}, {clients} clients", over[clients], bar))
    for name, words, bar in (
        ("padded_share", "padded share of rows", bars.PADDED),
        ("capture_s", "capture (s)", bars.CAPTURE_S),
        ("capture_mib", "capture (MiB)", bars.CAPTURE_MIB),
    ):
        if name in graphs:
            found.append(Figure.of(words, graphs[name], bar))
    return found
