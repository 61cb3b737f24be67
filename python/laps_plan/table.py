"""Tables for terminals and pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar


@dataclass
class Table:
    """A table for terminals and pages; the first column is aligned left, all others right."""

    STYLE: ClassVar[str] = "simple"
    """Format of tabulate for printed tables."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    """Note for readers, in a sentence or two."""

    def grid(self, style: str) -> str:
        """Return heads and rows in ``style``, a format of tabulate."""
        from tabulate import tabulate

        align = ["left", *["right"] * (len(self.heads) - 1)]
        return str(tabulate(self.rows, self.heads, tablefmt=style, disable_numparse=True, colalign=align))

    def __str__(self) -> str:
        return "\n".join(filter(None, (self.title, self.grid(self.STYLE), self.note)))
