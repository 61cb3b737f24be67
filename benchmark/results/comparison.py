"""Comparison of variants: the same work in turns, one ratio per round, and no verdict that the rounds do not
support."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import getitem
from typing import Any, TypeVar

from benchmark.results.bars import Bar
from benchmark.results.piece import Figure, Table
from benchmark.results.ratio import Ratio, ratio

T = TypeVar("T")


def take_turns(
    names: Sequence[str], rounds: int, once: Callable[[int, str], T], say: Callable[[str], None], what: str = ""
) -> dict[str, list[T]]:
    """Call ``once(round, name)`` as A B C, C B A, ... so that a drifting machine favours no variant; return the results
    by name. ``what``: text printed before the round."""
    seen: dict[str, list[T]] = {name: [] for name in names}
    for i in range(rounds):
        for name in names if i % 2 == 0 else reversed(names):
            say(f"{what}round {i + 1} of {rounds}, {name}")
            seen[name].append(once(i, name))
    return seen


@dataclass(frozen=True)
class Column:
    """One column of a table of variants."""

    head: str
    path: tuple[str, ...]
    """Path of the figure in a round's dictionary."""
    form: str = ".0f"
    """Format of the number."""
    scale: float = 1.0
    over: Callable[[Sequence[float]], float] = statistics.median
    """Function from the rounds' values to the value shown."""

    def text(self, values: Sequence[float]) -> str:
        """Return the cell; a dash for NaN."""
        value = self.scale * self.over(values)
        return "-" if math.isnan(value) else f"{value:{self.form}}"


FAILED = Column("failed", ("failed",), over=sum)
"""Requests that failed in all rounds."""


@dataclass(frozen=True)
class Comparison:
    """Figures of each round, by variant. A figure is given by its path in a round's dictionary: "short", "p90_ms"."""

    rounds: Mapping[str, Sequence[Mapping[str, Any]]]

    def values(self, name: str, *path: str) -> list[float]:
        """Return one figure of a variant, round by round."""
        return [float(reduce(getitem, path, one)) for one in self.rounds[name]]  # type: ignore[arg-type]

    def by_figure(self, name: str) -> dict[str, list[Any]]:
        """Return the values of all rounds of a variant, by the outermost name of a figure."""
        return {key: [one[key] for one in self.rounds[name]] for key in self.rounds[name][0]}

    def median(self, name: str, *path: str) -> float:
        """Return the median of a figure over the rounds."""
        return statistics.median(self.values(name, *path))

    def ratio(self, new: str, base: str, *path: str) -> Ratio:
        """Return one figure of a variant over another's, round by round."""
        return ratio(self.values(new, *path), self.values(base, *path))

    def best(self, names: Iterable[str], *path: str, most: bool = False) -> str | None:
        """Return the variant with the least (or most) median of a figure; None if no variant has the figure."""
        medians = {name: self.median(name, *path) for name in names if name in self.rounds}
        known = {name: m for name, m in medians.items() if not math.isnan(m)}
        return (max if most else min)(known, key=known.__getitem__) if known else None

    def figure(self, text: str, new: str, base: str, path: Sequence[str], bar: Bar | None = None) -> Figure:
        """Return the ratio of a figure, judged if there is a ``bar``."""
        return Figure.of(text, self.ratio(new, base, *path), bar)

    def rows(self, columns: Sequence[Column], beside: Comparison | None = None) -> list[tuple[str, ...]]:
        """Return a row for each variant, its name first. ``beside``: comparison whose figures join the same cells."""
        both = [self, *filter(None, [beside])]
        return [
            (name, *(" / ".join(c.text(one.values(name, *c.path)) for one in both) for c in columns))
            for name in self.rounds
        ]

    def table(
        self, title: str, first: str, columns: Sequence[Column], note: str = "", over: tuple[str, str] | None = None,
        beside: Comparison | None = None,
    ) -> Table:  # fmt: skip
        """Return a table with a row for each variant. ``first``: head of the column of names; ``over``: two variants
        whose ratios are the last row; ``beside``: as for ``rows``."""
        rows = self.rows(columns, beside)
        if over:
            ratios = ("" if c.over is sum else f"{self.ratio(*over, *c.path).median:.2f}" for c in columns)
            rows.append((" / ".join(over), *ratios))
        return Table(title, (first, *(c.head for c in columns)), rows, note)
