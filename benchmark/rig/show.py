"""Tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence


def table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Lines of columns, the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        first = cells[0].ljust(widths[0])
        return "  ".join((first, *(c.rjust(w) for c, w in zip(cells[1:], widths[1:], strict=True)))).rstrip()

    return "\n".join((title, line(heads), *map(line, rows)))
