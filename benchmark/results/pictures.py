"""Pictures of what was measured or simulated, as SVG; PNG where the name says so."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

COLOURS = {
    "fcfs": "#c1440e",
    "hrrn": "#b8860b",
    "shortest-prefill-first": "#7a5195",
    "laps-dual": "#56b4a0",
    "laps": "#0b6e4f",
    "laps-graphs": "#1f77b4",
    "AWD": "#1f77b4",
    "fixed window": "#ff7f0e",
}


@contextmanager
def axes(columns: int, path: Path, title: str = "", width: float = 5.0, height: float = 3.8) -> Iterator[Sequence[Any]]:
    """So many axes side by side, saved at the end."""
    import matplotlib

    matplotlib.use("Agg")
    # Text as text, so that it can be searched, and the same bytes for the same figures.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "laps", "font.size": 10})
    import matplotlib.pyplot as plt

    size = (width * columns, height)
    figure, grid = plt.subplots(1, columns, figsize=size, constrained_layout=True, squeeze=False)
    yield grid[0]
    if title:
        figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)


def distributions(curves: Mapping[str, Mapping[str, Sequence[float]]], title: str, path: Path) -> None:
    """class -> variant -> TTFT (ms) at even steps of the share of requests: short and long side by side."""
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


def against(told: Mapping[str, Mapping[str, Mapping[str, Sequence[float]]]], path: Path) -> None:
    """Measured and simulated TTFT side by side: variant -> measured/simulated -> figure -> seconds per round."""
    with axes(len(told), path) as each:
        for axis, (name, both) in zip(each, told.items(), strict=True):
            heights = {how: [1e3 * statistics.median(v) for v in of.values()] for how, of in both.items()}
            bars(axis, list(both["measured"]), heights)
            axis.set(title=name, ylabel="TTFT (ms)", yscale="log")


def bars(axis: Any, names: Sequence[str], heights: Mapping[str, Sequence[float]]) -> None:
    """Two bars a name."""
    for i, (label, values) in enumerate(heights.items()):
        axis.bar([k + 0.38 * i - 0.19 for k in range(len(names))], values, 0.36, label=label)
    axis.set_xticks(range(len(names)), names)
    axis.legend()


Line = Mapping[str, Sequence[float]]
"""Name of a line -> its y values."""


def lines(
    x: Sequence[float],
    panels: Mapping[str, Line],
    x_label: str,
    path: Path,
    *,
    log_x: bool = True,
    log_y: bool = False,
    title: str = "",
) -> None:
    """A panel for each y label."""
    with axes(len(panels), path, title) as each:
        for axis, (label, ys) in zip(each, panels.items(), strict=True):
            for name, y in ys.items():
                axis.plot(x, y, marker="o", markersize=3, linewidth=1.2, label=name, color=COLOURS.get(name))
            _clients(axis, x, x_label, log_x)
            axis.set_ylabel(label)
            if log_y:
                axis.set_yscale("log")
            axis.grid(alpha=0.3)
            axis.legend(fontsize=7)


def _clients(axis: Any, x: Sequence[float], label: str, log: bool) -> None:
    if log:
        axis.set_xscale("log", base=2)
        axis.set_xticks(list(x), [f"{v:g}" for v in x])
        axis.minorticks_off()
    axis.set_xlabel(label)


def window(result: Mapping[str, Any], path: Path) -> bool:
    """A panel for each question of ``benchmark.window`` that was asked; whether there is one."""
    panels = [(name, f) for name, f in (("closed", _closed), ("slo", _slo)) if name in result]
    if panels:
        with axes(len(panels), path, width=6.4) as each:
            for axis, (name, panel) in zip(each, panels, strict=True):
                panel(axis, result[name])
    return bool(panels)


def _closed(axis: Any, closed: Mapping[str, Any]) -> None:
    clients = [int(c) for c in closed["points"]]
    for name in next(iter(closed["points"].values()))["ratio"]:
        ratios = [p["ratio"][name] for p in closed["points"].values()]
        middle = [r["median"] for r in ratios]
        off = [[r["median"] - r["low"] for r in ratios], [r["high"] - r["median"] for r in ratios]]
        axis.errorbar(clients, middle, yerr=off, label=name, color=COLOURS.get(name), marker="o", capsize=3)
    axis.axhline(1.0, color="grey", linewidth=0.8)
    _clients(axis, clients, "clients in a closed loop of short prompts", log=True)
    axis.set_ylabel("requests/s over the dual queue alone")
    axis.legend()


def _slo(axis: Any, slo: Mapping[str, Any]) -> None:
    names = list(slo["violations"]["short"])
    shares = {
        f"{kind}, SLO {slo['slo_ms'][kind]:.0f} ms": [100 * statistics.median(of[n]) for n in names]
        for kind, of in slo["violations"].items()
    }
    bars(axis, [n.replace("-first", "\n-first") for n in names], shares)
    axis.set_ylabel("requests in violation of their SLO (%)")
    axis.set_title(f"open load, {slo['rate_per_s']:.0f} requests/s", fontsize=10)
