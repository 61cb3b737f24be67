"""The picture of ``benchmark.window``'s result."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

COLOURS = {"AWD": "tab:blue", "fixed window": "tab:orange"}


def draw(result: dict[str, Any], path: Path) -> None:
    """One panel per question that was asked; nothing where none was."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = [(name, f) for name, f in (("closed", _closed), ("slo", _slo)) if name in result]
    if not panels:
        return
    figure, axes = plt.subplots(1, len(panels), figsize=(6.4 * len(panels), 4.2), squeeze=False)
    for axis, (name, panel) in zip(axes[0], panels, strict=True):
        panel(axis, result[name])
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _closed(axis: Any, closed: dict[str, Any]) -> None:
    clients = [int(c) for c in closed["points"]]
    for name, colour in COLOURS.items():
        ratios = [p["ratio"][name] for p in closed["points"].values()]
        middle = [r["median"] for r in ratios]
        off = [[r["median"] - r["low"] for r in ratios], [r["high"] - r["median"] for r in ratios]]
        axis.errorbar(clients, middle, yerr=off, label=name, color=colour, marker="o", capsize=3)
    axis.axhline(1.0, color="grey", linewidth=0.8)
    axis.set_xscale("log", base=2)
    axis.set_xticks(clients, [str(c) for c in clients])
    axis.set_xlabel("clients in a closed loop of short prompts")
    axis.set_ylabel("requests/s over the dual queue alone")
    axis.legend()


def _slo(axis: Any, slo: dict[str, Any]) -> None:
    names = list(slo["violations"]["short"])
    for i, kind in enumerate(("short", "long")):
        shares = [100 * statistics.median(slo["violations"][kind][n]) for n in names]
        places = [x + 0.4 * i - 0.2 for x in range(len(names))]
        axis.bar(places, shares, 0.38, label=f"{kind}, SLO {slo['slo_ms'][kind]:.0f} ms")
    axis.set_xticks(range(len(names)), [n.replace("-first", "\n-first") for n in names])
    axis.set_ylabel("requests in violation of their SLO (%)")
    axis.set_title(f"open load, {slo['rate_per_s']:.0f} requests/s", fontsize=10)
    axis.legend()
