"""Choice of the points where a sliced forward pass pauses: before the first operator that would make a slice too long.

An operator cannot be paused in the middle: projections, one attention kernel, a block of rows of an MLP (FlowPrefill).
All costs have the same unit: floating-point operations on a server, seconds on an emulated device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

MIN_ROWS = 1024
"""Least tokens of a block of an MLP: with fewer, a GEMM would read the weights for too little arithmetic."""
_SLACK = 1.0 + 1e-6


class Operator(NamedTuple):
    """Cost of one operator: ``tokens`` for each new token, ``attention`` for each pair of tokens."""

    tokens: float = 0.0
    attention: float = 0.0
    divisible: bool = False
    """True if blocks of rows can be computed one by one."""

    def cost(self, tokens: int, pairs: int) -> float:
        """Return the cost for `tokens` new tokens and `pairs` of tokens (see ``pairs``)."""
        return self.tokens * tokens + self.attention * pairs


class Cut:
    """Slices of one pass. Each costs at most `each`, unless a single operator costs more."""

    def __init__(self, each: float) -> None:
        self.each, self.done = each, 0.0
        """``done``: cost of all operators counted so far."""
        self._slice = 0.0

    def count_operator(self, cost: float) -> bool:
        """Count an operator of this cost. Return True if the pass must pause before this operator."""
        self.done += cost
        return self.count_encoder_layer(cost)

    def count_encoder_layer(self, cost: float) -> bool:
        """Count a layer of an encoder, which runs before the operators and is not in ``done``. Return True if the pass
        must pause before this layer."""
        due = self._slice > 0.0 and self._slice + cost > self.each * _SLACK
        self._slice = cost if due else self._slice + cost
        return due

    def blocks(self, cost: float, rows: int) -> int:
        """Return the number of blocks in which an operator on ``rows`` tokens is computed."""
        return max(1, min(math.ceil(cost / (self.each * _SLACK)), rows // MIN_ROWS))


class Even:
    """Slices of one pass that several ranks run together: `parts` slices of nearly equal numbers of layers, independent
    of the work of each rank."""

    def __init__(self, layers: int, parts: int) -> None:
        """Raise ValueError for more slices than layers, or none."""
        if not 1 <= parts <= layers:
            raise ValueError(f"{parts} slices of {layers} layers")
        self.done = 0
        """Layers counted so far."""
        self._begins = {round(i * layers / parts) for i in range(1, parts)}

    def count_layer(self) -> bool:
        """Count a layer. Return True if the pass must pause before this layer."""
        self.done += 1
        return self.done - 1 in self._begins


def pairs(shape: Iterable[tuple[int, int]]) -> int:
    """Return the number of pairs of a new token and a token to which it attends. ``shape``: (new, history) tokens."""
    return sum(new * history + new * (new + 1) // 2 for new, history in shape)


def slices(operators: Sequence[Operator], layers: int, tokens: int, attended: int, each: float) -> Iterator[float]:
    """Yield the cost of each slice of a pass of ``layers`` equal layers. `attended`: see ``pairs``."""
    cut, begun = Cut(each), 0.0
    for _ in range(layers):
        for op in operators:
            cost = op.cost(tokens, attended)
            n = cut.blocks(cost, tokens) if op.divisible else 1
            for _ in range(n):
                if cut.count_operator(cost / n):
                    before = cut.done - cost / n
                    yield before - begun
                    begun = before
    yield cut.done - begun
