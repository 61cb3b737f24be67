"""Frame of ``paper`` and ``ablation``: questions asked one after the other, and the piece that they leave."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from laps_plan.sim.metrics import Outcome

from benchmark.results import pictures
from benchmark.results.piece import Figure, Piece, Table

SLO_S, WARM = 0.4, 0.1


@dataclass
class Point:
    """One simulation in a few numbers. Times in seconds."""

    rate: float
    mean: float
    short_p90: float
    long_p90: float
    over: float
    """Share of TTFTs above the SLO (0..1)."""
    busy: float
    steps: float
    """Steps per request."""
    overhead: float
    """Share of busy time that is the fixed cost of steps, whatever they hold (0..1)."""
    seconds: float

    @classmethod
    def of(cls, o: Outcome) -> Point:
        """Without the run-in."""
        groups = o.groups(slo_s=SLO_S, warm=WARM)
        short, long = (groups[k].ttft["p90"] if groups[k].requests else float("nan") for k in ("short", "long"))
        graph = o.profile.graph_fixed_s or 0.0
        fixed_s = (o.batches - o.replayed) * o.profile.coefficients.step_s + o.replayed * graph
        return cls(
            o.rate, groups["all"].ttft["mean"], short, long, groups["all"].violations or 0.0,
            o.utilisation, o.batches / max(1, len(o.record)), fixed_s / sum(o.busy_s), o.seconds,
        )  # fmt: skip


@dataclass
class Study:
    """Settings, and the piece that notes what was found."""

    requests: int
    """Requests of one simulation."""
    seed: int
    out: Path
    piece: Piece

    def table(self, title: str, heads: Sequence[str], rows: Sequence[Sequence[str]], note: str = "") -> None:
        """Note a table."""
        self.piece.tables.append(Table(title, heads, rows, note))

    def picture(
        self, name: str, caption: str, x: Sequence[float], panels: Mapping[str, pictures.Line], label: str, **how: Any
    ) -> None:
        """Draw lines over ``x``, a panel for each y label, and note them. ``how``: as of ``pictures.lines``."""
        pictures.lines(x, panels, label, self.out / name, **how)
        self.piece.pictures[name] = caption

    def judge(self, name: str, value: float, bar: str, met: bool) -> None:
        """Note a figure with a bar of its own."""
        self.piece.figures.append(Figure(name, value, bar, met))
