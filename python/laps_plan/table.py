"""Tables as they are printed, and as they stand on a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from tabulate import tabulate


@dataclass
class Table:
    """A table as it is printed and as it stands on a page; the first column to the left, the others to the right."""

    STYLE: ClassVar[str] = "simple"
    """Format of tabulate's, as printed."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    """Note for readers, in a sentence or two."""

    def grid(self, style: str) -> str:
        """Heads and rows; ``style``: one of tabulate's."""
        align = ["left", *["right"] * (len(self.heads) - 1)]
        return str(tabulate(self.rows, self.heads, tablefmt=style, disable_numparse=True, colalign=align))

    def __str__(self) -> str:
        return "\n".join(filter(None, (self.title, self.grid(self.STYLE), self.note)))
