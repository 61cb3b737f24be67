"""Plots of times to first token, as SVG, or as PNG if the file name ends so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np

COLOURS = {
    "fcfs": "#c1440e",
    "hrrn": "#b8860b",
    "shortest-prefill-first": "#7a5195",
    "laps-dual": "#56b4a0",
    "laps": "#0b6e4f",
    "laps-graphs": "#1f77b4",
    "laps, pools": "#8c564b",
}


@contextmanager
def axes(columns: int, path: Path | IO[str], title: str = "", width: float = 5.0) -> Iterator[Sequence[Any]]:
    """Yield ``columns`` axes side by side. Save them at the end to the path, or as SVG into the open file."""
    import matplotlib

    matplotlib.use("Agg")
    # Keep text as text, so that it can be searched, and write the same bytes for the same figures.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "laps", "font.size": 10})
    import matplotlib.pyplot as plt

    figure, grid = plt.subplots(1, columns, figsize=(width * columns, 3.8), constrained_layout=True, squeeze=False)
    yield grid[0]
    if title:
        figure.suptitle(title)
    if isinstance(path, Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    else:
        figure.savefig(path, format="svg", metadata={"Date": None})
    plt.close(figure)


def distributions(curves: Mapping[str, Mapping[str, Sequence[float]]], title: str, path: Path | IO[str]) -> None:
    """Plot class -> variant -> TTFT (ms) at even steps of the share of requests: short and long side by side."""
    from matplotlib import ticker

    shown = {kind: of for kind, of in curves.items() if any(of.values())}
    with axes(len(shown) or 1, path, title) as each:
        for axis, (kind, of) in zip(each, shown.items(), strict=False):
            for name, curve in of.items():
                if curve:
                    share = np.linspace(0.0, 1.0, len(curve))
                    axis.plot(curve, share, label=name, color=COLOURS.get(name), linewidth=1.8)
            axis.axhline(0.9, color="#888888", linewidth=0.8, linestyle=":")
            axis.set_xscale("log")
            axis.xaxis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
            axis.xaxis.set_major_formatter(ticker.ScalarFormatter())
            axis.xaxis.set_minor_locator(ticker.NullLocator())
            axis.set(xlabel="time to first token (ms)", ylabel="share of requests", title=f"{kind} requests")
            axis.set_ylim(0, 1.01)
            axis.grid(alpha=0.3)
            axis.legend(loc="lower right", fontsize=8)
