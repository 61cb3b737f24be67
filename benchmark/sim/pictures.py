"""Small pictures (SVG) of what was simulated."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def _plot(columns: int, height: float = 3.4) -> tuple[Any, Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    # Text stays text: smaller files, and it can be searched.
    matplotlib.rcParams["svg.fonttype"] = "none"
    matplotlib.rcParams["svg.hashsalt"] = "laps"
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, columns, figsize=(5.2 * columns, height), squeeze=False)
    return plt, figure, axes[0]


def _save(plt: Any, figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def against(told: Mapping[str, Mapping[str, Mapping[str, Sequence[float]]]], path: Path) -> None:
    """Measured and simulated TTFT side by side: variant -> measured/simulated -> figure -> seconds per round."""
    plt, figure, axes = _plot(len(told))
    for axis, (name, both) in zip(axes, told.items(), strict=True):
        for i, how in enumerate(("measured", "simulated")):
            keys = list(both[how])
            axis.bar(
                [k + 0.38 * i - 0.19 for k in range(len(keys))],
                [1e3 * statistics.median(both[how][k]) for k in keys], 0.36, label=how,
            )  # fmt: skip
            axis.set_xticks(range(len(keys)), keys)
        axis.set_title(name)
        axis.set_ylabel("TTFT (ms)")
        axis.set_yscale("log")
        axis.legend()
    _save(plt, figure, path)


Line = Mapping[str, Sequence[float]]
"""Name of a line -> its y values."""


def lines(
    x: Sequence[float],
    panels: Sequence[tuple[str, Line]],
    x_label: str,
    path: Path,
    *,
    log_x: bool = True,
    log_y: bool = False,
    bar: float | None = None,
) -> None:
    """One panel per (y label, lines); ``bar``: a level to draw."""
    plt, figure, axes = _plot(len(panels))
    for axis, (label, ys) in zip(axes, panels, strict=True):
        for name, y in ys.items():
            axis.plot(x, y, marker="o", markersize=3, linewidth=1.2, label=name)
        if bar is not None:
            axis.axhline(bar, color="grey", linewidth=0.8)
        if log_x:
            axis.set_xscale("log", base=2)
            axis.set_xticks(list(x), [f"{v:g}" for v in x])
            axis.minorticks_off()
        if log_y:
            axis.set_yscale("log")
        axis.set_xlabel(x_label)
        axis.set_ylabel(label)
        axis.legend(fontsize=7)
    _save(plt, figure, path)
