"""Pictures of measured and simulated figures, as SVG or PNG according to the file's name."""

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
            for i, (how, of) in enumerate(both.items()):
                heights = [1e3 * statistics.median(seconds) for seconds in of.values()]
                axis.bar([k + 0.38 * i - 0.19 for k in range(len(heights))], heights, 0.36, label=how)
            axis.set_xticks(range(len(both["measured"])), list(both["measured"]))
            axis.legend()
            axis.set(title=name, ylabel="TTFT (ms)", yscale="log")


Line = Mapping[str, Sequence[float]]
"""Name of a line -> its y values."""


def lines(x: Sequence[float], panels: Mapping[str, Line], x_label: str, path: Path, title: str = "") -> None:
    """Draw a panel of lines for each y label, over a logarithmic x axis (base 2)."""
    with axes(len(panels), path, title) as each:
        for axis, (label, ys) in zip(each, panels.items(), strict=True):
            for name, y in ys.items():
                axis.plot(x, y, marker="o", markersize=3, linewidth=1.2, label=name, color=COLOURS.get(name))
            axis.set_xscale("log", base=2)
            axis.set_xticks(list(x), [f"{v:g}" for v in x])
            axis.minorticks_off()
            axis.set(xlabel=x_label, ylabel=label)
            axis.grid(alpha=0.3)
            axis.legend(fontsize=7)


def tokens(rounds: Mapping[str, Any], path: Path) -> None:
    """Draw a panel for each variant: a row of marks for each stream, one mark per token, and grey while a document
    waits. `rounds`: ``colocated.Tokens`` of each variant."""
    last = max(t for of in rounds.values() for times in (*of.streams, *of.documents) for t in times)
    with axes(len(rounds), path, "Tokens of each stream, while documents come", width=6.4) as each:
        for axis, (name, of) in zip(each, rounds.items(), strict=True):
            for begin, end in of.documents:
                axis.axvspan(begin, end, color="#dddddd", linewidth=0)
            axis.eventplot(of.streams, colors=COLOURS.get(name, "#c1440e"), linewidths=0.8, linelengths=0.8)
            axis.set(title=name, xlabel="seconds", ylabel="stream", yticks=range(len(of.streams)))
            axis.set_yticklabels(range(1, len(of.streams) + 1))
            axis.set_xlim(0.0, last)
