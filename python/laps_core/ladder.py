"""The ladder of prefill graphs: row counts that are captured, batches they admit, and which one serves a batch.

A graph runs a fixed number of rows. Requests are packed in them end to end; rows beyond a batch's tokens are padding.
Lengths and rows are in tokens, times in seconds.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from laps_core.config import LapsConfig

MULTIPLE = 8
"""Row counts are multiples of it: what tensor cores work on."""
MOST_ROWS = 2048
"""No graph has more rows than this: beyond, launches hide behind compute."""
MOST = 64
"""More products than this give way to the steps of ``latency``: each costs three passes of the model at start."""
PADDING = 2
"""A graph serves no batch of less than its rows by this; SGLang's runner has the same limit."""


def row_counts(
    lengths: Sequence[int], batches: Sequence[int], *, strategy: str, most: int, multiple: int = MULTIPLE
) -> tuple[int, ...]:
    """Row counts, ascending, ``most`` tokens at most: the products L x B, rounded up.

    ``memory``: these alone. ``latency``: four steps to each doubling as well, so that no batch pads more than a quarter
    of its rows, but for the smallest steps of ``multiple``.
    """
    top = most // multiple * multiple
    up = (-(-a * b // multiple) * multiple for a, b in itertools.product(lengths, batches))
    products = {min(n, top) for n in up} - {0}
    if not products:
        return ()
    steps, at = {max(products)}, multiple
    while at < max(products):
        steps.add(at)
        doubling = 1 << (at.bit_length() - 1)
        at += max(multiple, doubling // 4 // multiple * multiple)
    wanted = products if strategy == "memory" else products | steps
    return tuple(sorted(wanted if len(wanted) <= MOST else steps))


@dataclass(frozen=True)
class Ladder:
    """Row counts, the rule of admission, and which row counts were faster than the stock path."""

    rows: tuple[int, ...]  # captured, ascending
    length: int  # L: most new tokens of a request
    slots: int  # B: most requests
    faster: frozenset[int] = frozenset()  # row counts that pay

    @classmethod
    def of(cls, config: LapsConfig, *, tokens: int, length: int, slots: int, multiple: int = 1) -> Ladder | None:
        """The configured ladder for batches of so many tokens, tokens a request, and requests; None if nothing is left.
        ``multiple``: what rows must divide by on this server."""
        lengths = [n for n in config.graph_lengths if n <= length]
        batches = [n for n in config.graph_batches if n <= slots]
        whole = math.lcm(MULTIPLE, multiple)
        rows = row_counts(lengths, batches, strategy=config.graph_strategy, most=tokens, multiple=whole)
        return cls(rows, max(lengths), max(batches)) if rows else None

    def admits(self, new: Sequence[int]) -> bool:
        """Return True if a batch of requests with so many new tokens each is one of those the graphs are for."""
        return 0 < len(new) <= self.slots and max(new) <= self.length

    def holding(self, tokens: int) -> int | None:
        """The least row count that holds so many tokens; None if they are too many, or pad it too much."""
        at = bisect.bisect_left(self.rows, tokens)
        return self.rows[at] if at < len(self.rows) and self.rows[at] <= PADDING * tokens else None

    def choose(self, new: Sequence[int]) -> tuple[int | None, str]:
        """The row count that serves an admitted batch, None for the stock path; and why (no-graph: none holds it)."""
        rows = self.holding(sum(new))
        if rows is None or rows not in self.faster:
            return None, "no-graph" if rows is None else "slower"
        return rows, "faster"

    def sample(self, rows: int) -> list[int]:
        """New tokens of each request of a batch to time ``rows`` with: the mean it serves, in as few requests."""
        below = max((n for n in self.rows if n < rows), default=0)
        tokens = min((max(below + 1, -(-rows // PADDING)) + rows) // 2, self.length * self.slots)
        count = -(-tokens // self.length)
        return [tokens // count + (i < tokens % count) for i in range(count)]

    def timed(self, times: Mapping[int, tuple[float, float]]) -> Ladder:
        """The same with its table, from what the sample of each row count took (stock path, graph)."""
        return replace(self, faster=frozenset(n for n, (stock, graph) in times.items() if graph < stock))
