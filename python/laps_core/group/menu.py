"""Menu that a rank sends to the other ranks each round: a batch for each budget of a ladder, and its waiting requests.

A menu is sent as one row of integers, so that one gather on the CPU group is enough. Times are microseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from laps_core.group.cost import OwnShape

LADDER: tuple[float, ...] = tuple(0.035 * 2.0 ** (k / 2.0) for k in range(12))
"""Budgets of a rank's own part (seconds): 35 ms to 1.6 s. The smallest makes a step hardly longer than an empty step.
The largest can unpack a history of 128k tokens and spend the same time on new tokens."""
_EACH = 4
ROW = _EACH * len(LADDER) + 15
"""Integers in a menu's row."""


class Level(NamedTuple):
    """Batch that a rank would run with one of the budgets."""

    own_us: int
    """Own part of the rank; 0 = the rank would idle."""
    tokens: int
    """New tokens."""
    useful_us: int
    """Own part without the extra cost of small chunks (``GroupCost.useful_s``)."""
    weight: int
    """Weight of the requests in the batch, in thousandths."""


NO_DECODE_DUE = 1 << 40
"""Value of ``Waits.until_decode_us`` if no decode step is due."""


class Waits(NamedTuple):
    """Requests that wait on a rank, including the batches of its menu."""

    weight: int
    """Sum of ``Prompt.weight``, in thousandths."""
    coming: int
    """Weight that arrives per second, in thousandths."""
    shorts: int
    """Weight of the short requests, in thousandths."""
    longs: int
    """Number of long prompts."""
    least: int
    """First level at which the oldest long prompt makes progress, if it goes first."""
    until_decode_us: int = NO_DECODE_DUE
    """Time until the next decode step has to start, on a rank that also decodes."""
    owed_us: int = 0
    """Time owed to prompts before the next decode step, in return for the time of earlier decode steps."""


class Terms(NamedTuple):
    """Learned times of the parts of a step that are not a rank's own part. All ranks use the terms of rank 0."""

    fixed_us: int
    own_floor_us: int
    expert_floor_us: int
    expert_ps: int
    """Experts, per token (picoseconds)."""


class Menu(NamedTuple):
    """Menu of one rank."""

    levels: tuple[Level, ...]
    """One level for each budget of LADDER, in ascending order."""
    waits: Waits
    terms: Terms
    ran: OwnShape
    """Batch of the rank in the previous step, for learning."""

    def row(self) -> list[int]:
        """Return the menu as ROW integers."""
        return [*(n for level in self.levels for n in level), *self.waits, *self.terms, *self.ran]

    @classmethod
    def read(cls, row: Sequence[int]) -> Menu:
        """Read a menu from the integers of ``row``. Raises ValueError if the number of integers is not ROW."""
        if len(row) != ROW:
            raise ValueError(f"a menu of {len(row)} numbers, not {ROW}: ranks of different releases?")
        end = _EACH * len(LADDER)
        levels = tuple(Level(*row[i : i + _EACH]) for i in range(0, end, _EACH))
        waits, terms, ran = row[end : end + 7], row[end + 7 : end + 11], row[end + 11 :]
        return cls(levels, Waits(*waits), Terms(*terms), OwnShape(*ran))
