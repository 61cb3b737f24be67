"""Ladder of prefill graphs: the captured row counts, the batches they admit, and the choice of a graph for a batch.

A graph runs a fixed number of rows. Requests are packed in the rows end to end; rows beyond a batch's tokens are
padding. Lengths and rows are in tokens, times in seconds.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from laps_core.config import LapsConfig

MULTIPLE = 8
"""Row counts are multiples of this number, on which tensor cores work."""
MOST_ROWS = 2048
"""Most rows of a graph: with more rows, launches hide behind compute."""
MOST = 64
"""Most row counts, because each costs three passes of the model at start; beyond, only the steps of ``latency``."""
PADDING = 2
"""A graph has at most this many times the tokens of its batch as rows; SGLang's runner has the same limit."""


def row_counts(
    lengths: Sequence[int], batches: Sequence[int], *, strategy: str, most: int, multiple: int = MULTIPLE
) -> tuple[int, ...]:
    """Return the row counts to capture, ascending, each at most ``most`` tokens and a multiple of ``multiple``.

    ``memory``: the products L x B, rounded up. Other strategies: also four steps for each doubling, so that no batch
    pads more than a quarter of its rows, except with the smallest row counts.
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
    """Row counts, the limits for batches, and the row counts that were faster than SGLang's own path."""

    rows: tuple[int, ...]  # captured, ascending
    length: int  # L: most new tokens of a request
    slots: int  # B: most requests
    faster: frozenset[int] = frozenset()  # row counts faster than SGLang's own path

    @classmethod
    def of(cls, config: LapsConfig, *, tokens: int, length: int, slots: int, multiple: int = 1) -> Ladder | None:
        """Return the configured ladder; None if no row count is left. ``tokens``: most tokens of a batch; ``length``:
        most tokens of a request; ``slots``: most requests. ``multiple``: row counts must be multiples of this, too."""
        lengths = [n for n in config.graph_lengths if n <= length]
        batches = [n for n in config.graph_batches if n <= slots]
        whole = math.lcm(MULTIPLE, multiple)
        rows = row_counts(lengths, batches, strategy=config.graph_strategy, most=tokens, multiple=whole)
        return cls(rows, max(lengths), max(batches)) if rows else None

    def admits(self, new: Sequence[int]) -> bool:
        """Return True if the limits L and B admit a batch. ``new``: new tokens of each request."""
        return 0 < len(new) <= self.slots and max(new) <= self.length

    def fitting_rows(self, tokens: int) -> int | None:
        """Return the smallest row count that holds ``tokens``; None if there is none, or if it has too much padding."""
        at = bisect.bisect_left(self.rows, tokens)
        return self.rows[at] if at < len(self.rows) and self.rows[at] <= PADDING * tokens else None

    def choose(self, new: Sequence[int]) -> tuple[int | None, str]:
        """Return the row count for an admitted batch (None: SGLang's own path), and why (no-graph: none holds it)."""
        rows = self.fitting_rows(sum(new))
        if rows is None or rows not in self.faster:
            return None, "no-graph" if rows is None else "slower"
        return rows, "faster"

    def sample(self, rows: int) -> list[int]:
        """Return new tokens per request of a batch for timing ``rows``: the mean size it serves, in few requests."""
        below = max((n for n in self.rows if n < rows), default=0)
        tokens = min((max(below + 1, -(-rows // PADDING)) + rows) // 2, self.length * self.slots)
        count = -(-tokens // self.length)
        return [tokens // count + (i < tokens % count) for i in range(count)]

    def with_times(self, times: Mapping[int, tuple[float, float]]) -> Ladder:
        """Return this ladder with ``faster`` set from ``times``: row count -> seconds (SGLang's own path, graph)."""
        return replace(self, faster=frozenset(n for n, (stock, graph) in times.items() if graph < stock))
