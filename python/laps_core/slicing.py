"""Choice of the points where a forward pass that runs in slices is paused: before the first operator that would make
its slice too long.

An operator is what cannot be paused in the middle: projections, one attention kernel, a block of rows of an MLP
(FlowPrefill). Costs are in any one unit: floating-point operations on a server, seconds on an emulated device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

MIN_ROWS = 1024
"""Tokens of a block of an MLP: with fewer a GEMM would read the weights for too little arithmetic."""
_SLACK = 1.0 + 1e-6


class Operator(NamedTuple):
    """Cost of one operator: ``tokens`` for each new token, ``attention`` for each pair of tokens."""

    tokens: float = 0.0
    attention: float = 0.0
    divisible: bool = False
    """True if the rows can be computed in blocks."""

    def cost(self, tokens: int, pairs: int) -> float:
        """Cost for so many new tokens and (new, earlier) pairs of tokens."""
        return self.tokens * tokens + self.attention * pairs


class Cut:
    """The slices of one pass, each of at most `each`, where its operators allow."""

    def __init__(self, each: float) -> None:
        self.each, self.done = each, 0.0
        """``done``: cost of all operators so far."""
        self._slice = 0.0

    def due(self, cost: float) -> bool:
        """Count an operator of this cost; True if the pass is to be paused before it."""
        self.done += cost
        return self.before_due(cost)

    def before_due(self, cost: float) -> bool:
        """Count what comes before the operators, and is not of ``done``: an encoder's layer. True as in ``due``."""
        due = self._slice > 0.0 and self._slice + cost > self.each * _SLACK
        self._slice = cost if due else self._slice + cost
        return due

    def blocks(self, cost: float, rows: int) -> int:
        """Number of blocks in which an operator of ``rows`` tokens is computed."""
        return max(1, min(math.ceil(cost / (self.each * _SLACK)), rows // MIN_ROWS))


class Even:
    """The slices of one pass that several ranks run together: `parts` of as many layers each as can be, whatever each
    rank computes in them."""

    def __init__(self, layers: int, parts: int) -> None:
        """Raises ValueError for more slices than layers."""
        if not 1 <= parts <= layers:
            raise ValueError(f"{parts} slices of {layers} layers")
        self.done = 0
        """Layers so far."""
        self._begins = {round(i * layers / parts) for i in range(1, parts)}

    def due(self) -> bool:
        """Count a layer; True if the pass is to be paused before it."""
        self.done += 1
        return self.done - 1 in self._begins


def pairs(shape: Iterable[tuple[int, int]]) -> int:
    """Pairs of a new token and one that it attends to, for (new, history) tokens of each request."""
    return sum(new * history + new * (new + 1) // 2 for new, history in shape)


def slices(operators: Sequence[Operator], layers: int, tokens: int, attended: int, each: float) -> Iterator[float]:
    """Cost of each slice of a pass of ``layers`` equal layers. `attended`: see ``pairs``."""
    cut, begun = Cut(each), 0.0
    for _ in range(layers):
        for op in operators:
            cost = op.cost(tokens, attended)
            n = cut.blocks(cost, tokens) if op.divisible else 1
            for _ in range(n):
                if cut.due(cost / n):
                    before = cut.done - cost / n
                    yield before - begun
                    begun = before
    yield cut.done - begun
