"""Pictures of a comparison, as SVG."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

COLOURS = {
    "fcfs": "#c1440e",
    "hrrn": "#b8860b",
    "shortest-prefill-first": "#7a5195",
    "laps-dual": "#56b4a0",
    "laps": "#0b6e4f",
    "laps-cells": "#1f77b4",
}


def _plot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    # Text as text, and the same bytes for the same figures.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "laps", "font.size": 10})
    import matplotlib.pyplot as plt

    return plt


def _save(plt: Any, figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)


def distributions(curves: Mapping[str, Mapping[str, Sequence[float]]], title: str, path: Path) -> None:
    """class -> variant -> TTFT (ms) at even steps of the share of requests: short and long side by side."""
    plt = _plot()
    from matplotlib import ticker

    shown = {kind: of for kind, of in curves.items() if any(of.values())}
    figure, axes = plt.subplots(1, len(shown) or 1, figsize=(10, 3.8), constrained_layout=True, squeeze=False)
    for axis, (kind, of) in zip(axes[0], shown.items(), strict=False):
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
    figure.suptitle(title)
    _save(plt, figure, path)


def over_clients(points: Mapping[int, Mapping[str, Mapping[str, Sequence[float]]]], title: str, path: Path) -> None:
    """clients -> variant -> figure -> values: requests/s and TTFT P90 over the number of clients."""
    plt = _plot()
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.8), constrained_layout=True)
    x = sorted(points)
    for axis, key, label in zip(axes, ("requests_per_s", "p90_ms"), ("requests/s", "TTFT P90 (ms)"), strict=True):
        for name in points[x[0]]:
            axis.plot(
                x, [statistics.median(points[n][name][key]) for n in x], marker="o", label=name, color=COLOURS.get(name)
            )
        axis.set(xscale="log", xlabel="clients", ylabel=label)
        axis.set_xticks(x, [str(n) for n in x])
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    figure.suptitle(title)
    _save(plt, figure, path)
