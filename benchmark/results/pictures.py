"""Pictures of measured and simulated figures, as SVG, or PNG by the file's name."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from laps_plan.pictures import COLOURS, axes


def against(told: Mapping[str, Mapping[str, Mapping[str, Sequence[float]]]], path: Path) -> None:
    """Draw measured and simulated TTFT side by side: variant -> measured/simulated -> figure -> seconds per round."""
    with axes(len(told), path) as each:
        for axis, (name, both) in zip(each, told.items(), strict=True):
            heights = {how: [1e3 * statistics.median(v) for v in of.values()] for how, of in both.items()}
            bars(axis, list(both["measured"]), heights)
            axis.set(title=name, ylabel="TTFT (ms)", yscale="log")


def bars(axis: Any, names: Sequence[str], heights: Mapping[str, Sequence[float]]) -> None:
    """Draw two bars per name."""
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
    """Draw a panel for each y label."""
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


def tokens(rounds: Mapping[str, Any], path: Path) -> None:
    """A panel for each variant: a row of marks for each stream, one a token, and grey where a document waits.
    `rounds`: ``colocated.Tokens`` of each."""
    last = max(t for of in rounds.values() for times in (*of.streams, *of.documents) for t in times)
    with axes(len(rounds), path, "Tokens of each stream, while documents come", width=6.4) as each:
        for axis, (name, of) in zip(each, rounds.items(), strict=True):
            for begin, end in of.documents:
                axis.axvspan(begin, end, color="#dddddd", linewidth=0)
            axis.eventplot(of.streams, colors=COLOURS.get(name, "#c1440e"), linewidths=0.8, linelengths=0.8)
            axis.set(title=name, xlabel="seconds", ylabel="stream", yticks=range(len(of.streams)))
            axis.set_yticklabels(range(1, len(of.streams) + 1))
            axis.set_xlim(0.0, last)


def window(result: Mapping[str, Any], path: Path) -> bool:
    """Draw a panel for each question of ``benchmark.serve.window`` that was run; return True if there is one."""
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
