"""One piece of the report: the result that a benchmark writes.

``Piece.write`` puts ``piece.json`` and the pictures into a folder; ``benchmark/report.py`` turns such folders into one
page and adds no text of its own.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from laps_plan.table import Table

from benchmark.results.bars import Bar
from benchmark.results.machine import commit, machine, versions
from benchmark.results.ratio import Ratio
from benchmark.rig import REPO

NAME = "piece.json"


@dataclass
class Figure:
    """A number with its bar."""

    name: str
    value: float
    bar: str = ""
    """Text of the bar, for example "<= 0.5"; empty if there is no bar."""
    met: bool | None = None
    """True if the value meets the bar; None if there is no bar."""
    low: float | None = None
    high: float | None = None
    rounds: int | None = None
    verdict: str = ""
    """Verdict on a ratio: "more", "less", "not shown"."""

    @classmethod
    def of(cls, name: str, found: Ratio | float, bar: Bar | None = None, rounds: int | None = None) -> Figure:
        """Return the figure of a ratio with its interval, or of a number; judged if there is a ``bar``."""
        value = found.median if isinstance(found, Ratio) else found
        figure = cls(name, value, rounds=rounds)
        if isinstance(found, Ratio):
            figure.low, figure.high, figure.rounds, figure.verdict = found.low, found.high, found.rounds, found.verdict
        if bar is not None:
            figure.bar, figure.met = str(bar), bar.met(value)
        return figure

    def __str__(self) -> str:
        spread = "" if self.low is None else f" [{self.low:.3f}, {self.high:.3f}] over {self.rounds} rounds"
        told = {True: "met", False: "MISSED", None: ""}[self.met]
        return f"{self.name}: {self.value:.3g}{spread}" + (f"  {told} ({self.bar})" if self.bar else "")


@dataclass
class Piece:
    """The result of one benchmark."""

    name: str
    """Folder and file name."""
    title: str
    text: str
    """Question and method, in a few sentences."""
    seed: int
    tables: list[Table] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    pictures: dict[str, str] = field(default_factory=dict)
    """File beside ``piece.json`` -> caption."""
    data: dict[str, Any] = field(default_factory=dict)
    """Raw data (JSON-ready)."""
    command: str = ""
    machine: dict[str, Any] = field(default_factory=machine)
    versions: dict[str, str] = field(default_factory=versions)
    commit: str = field(default_factory=commit)
    """Commit of this repository at the time of the measurement; empty if not recorded."""

    def judge(self, name: str, found: Ratio | float, bar: Bar | None = None, rounds: int | None = None) -> None:
        """Add a figure."""
        self.figures.append(Figure.of(name, found, bar, rounds))

    def write(self, out: Path) -> Path:
        """Save the piece, with paths relative to the repository; return its file."""
        out.mkdir(parents=True, exist_ok=True)
        path = out / NAME
        path.write_text(json.dumps(asdict(self), indent=1).replace(f"{REPO}/", "") + "\n")
        return path

    def save_and_print(self, out: Path, program: str, argv: Sequence[str] | None, *, every: bool = False) -> None:
        """Save the piece at the end of a command, with the command line, and print its tables and the figures with a
        bar (all with ``every``)."""
        self.command = command_text(program, argv)
        path = self.write(out)
        for one in self.tables:
            print(f"\n{one}")
        told = [f for f in self.figures if f.bar or every]
        print(*(["", *told] if told else []), path, sep="\n", flush=True)

    @classmethod
    def read(cls, path: Path) -> Piece:
        """Read a piece from its folder, or from its file in a page. Raises OSError, ValueError, TypeError."""
        raw = {"commit": "", **json.loads((path if path.is_file() else path / NAME).read_text())}
        raw["tables"] = [Table(**t) for t in raw["tables"]]
        # Infinite values and NaN are null in a page's JSON.
        raw["figures"] = [
            Figure(**f | {"value": math.nan if f["value"] is None else f["value"]}) for f in raw["figures"]
        ]
        return cls(**raw)


def command_text(program: str, argv: Sequence[str] | None) -> str:
    """Return the command line of this run, for the report. Paths are relative to the repository; paths outside it are
    left out. ``program``: a module, or a command that begins with "./"."""
    said = [word.removeprefix(f"{REPO}/") for word in (sys.argv[1:] if argv is None else argv)]
    kept = [w for i, w in enumerate(said) if not (w.startswith("/") or (w == "--out" and said[i + 1][:1] == "/"))]
    return " ".join([program if program.startswith("./") else f"python -m {program}", *kept])
