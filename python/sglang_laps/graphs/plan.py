"""Which cells this server should capture: the configured grid within its limits, most valuable first."""

from __future__ import annotations

import math
from dataclasses import dataclass

from laps_core.buckets import Budget, Cell, expected_batches, grid, rank
from laps_core.config import LapsConfig


@dataclass(frozen=True)
class Limits:
    """What bounds the grid here: tokens per batch, tokens per request, requests, row multiple.

    ``shaped`` False: attention is not fixed to L and B, so cells differ by rows alone.
    """

    tokens: int
    length: int
    slots: int
    granule: int
    shaped: bool = True


@dataclass(frozen=True)
class Plan:
    """``cells``: to capture, in this order. ``candidates``: all that traffic may ask for later."""

    cells: tuple[Cell, ...]
    candidates: tuple[Cell, ...]
    budget: Budget
    granule: int

    @property
    def roof(self) -> Cell:
        """Rows, length and slots that cover every cell: what static buffers are made for."""
        return Cell(*(max(getattr(c, a) for c in self.candidates) for a in ("tokens", "length", "batch")))


def make_plan(config: LapsConfig, limits: Limits) -> Plan | None:
    """The plan, or None if no cell fits the limits."""
    granule = math.lcm(8, limits.granule)
    top = min(limits.length, config.graph_max_length or limits.length)
    lengths = [v for v in config.graph_lengths if v <= top]
    slots = [v for v in config.graph_batches if v <= limits.slots]
    if not lengths or not slots:
        return None
    if not limits.shaped:
        lengths, slots = [max(lengths)], [max(slots)]
    max_tokens = min(config.graph_max_tokens, limits.tokens)
    candidates = grid(lengths, slots, pad_max=config.graph_pad_max, granule=granule, max_tokens=max_tokens)
    if not candidates:
        return None
    cells = rank(
        candidates,
        expected_batches(lengths, list(config.graph_batches)),
        pad_max=config.graph_pad_max,
        granule=granule,
        count=config.graph_budget,
    )
    # A small grid leaves room: full batches are rare in the expected mix, not in a server that was given this grid.
    cells += [c for c in reversed(candidates) if c not in set(cells)][: config.graph_budget - len(cells)]
    # The largest first: graphs captured later reuse its memory, and its output buffer fits all.
    largest = max(cells)
    cells.sort(key=lambda c: c != largest)
    budget = Budget(config.graph_budget, config.graph_budget_s, config.graph_budget_mib)
    return Plan(tuple(cells), tuple(candidates), budget, granule)
