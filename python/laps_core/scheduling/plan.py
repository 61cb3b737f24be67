"""One decision, what it is made from, and how it travels from the leading rank to the others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from laps_core.length import LONG, SHORT, LengthClass

LOOKAHEAD = 512
"""Waiting requests of a class that are looked at; no batch of them is longer than this."""
PLAN_NUMBERS = 11 + 2 * LOOKAHEAD
"""Length of a Plan in whole numbers."""
_CLASSES = (SHORT, LONG)


class Paused(NamedTuple):
    """The batch of long work that is paused between two slices."""

    left_s: float
    """Device time that it still needs (seconds)."""
    requests: int
    depth: int
    """Batches of long work under way."""
    rank: int = 0
    """Highest priority among their requests; smaller is higher."""


@dataclass(slots=True)
class Launch:
    """One batch on the device."""

    cls: LengthClass
    preempts: bool
    """A short batch while long work waits or is paused."""
    oldest: bool
    """A long batch with the prompt that has waited longest, first in it or whole."""
    shorts: int
    """Short requests in it."""


class Plan(NamedTuple):
    """One decision."""

    order: tuple[LengthClass, ...]
    """Classes to try, in turn; empty = run nothing now, or go on with what is paused."""
    picked: tuple[int, ...] = ()
    """Short requests to take first, as indices into the short view; the others follow in their own order."""
    longs: tuple[int, ...] = ()
    """Long prompts of the next long batch, as indices into those given, in order."""
    tokens: int = 0
    """New tokens of the long batch; 0 = what the server's chunk holds."""
    layers: int = 0
    """Layers a slice of the long batch; 0 = in one piece."""
    threshold: int = 0
    """Longest short request from the next round on (tokens)."""
    waiting: bool = False
    """A short batch is held back."""
    mixed: bool = False
    """The short requests picked share the step of the long batch: it cannot make way for them [M]."""
    keeps_room: bool = False
    """A long prompt is owed the memory that it lacks: nothing new starts in its place."""
    until_s: float = math.inf
    """Until when, if nothing comes before (the leading rank's clock)."""
    reason: str = ""
    """Why a short batch leaves, for the leading rank's books."""
    waited_s: float = 0.0
    late: int = 0
    passed_over: bool = False
    """A short request older than one of those picked stays behind; for the same books."""
    oldest: bool = False
    """The long batch holds the prompt that has waited longest, first in it or whole; for the same books."""
    full: bool = False
    """No further short request fits into the batch; for the same books."""
    contended: bool = False
    """Long work waits or is paused; for the same books."""

    def numbers(self) -> list[int]:
        """The decision as PLAN_NUMBERS whole numbers."""
        head = [len(self.order), *(_CLASSES.index(c) for c in self.order)][:3]
        head += [0] * (3 - len(head))
        flags = [int(self.waiting), int(self.mixed), int(self.keeps_room)]
        counts = [self.tokens, self.layers, self.threshold, *flags, len(self.picked), len(self.longs)]
        body = [*head, *counts, *self.picked, *self.longs]
        return body + [0] * (PLAN_NUMBERS - len(body))

    @classmethod
    def of(cls, numbers: Sequence[int]) -> Plan:
        """Undo ``numbers``."""
        n, first, second, tokens, layers, threshold, waiting, mixed, room, picks, longs = numbers[:11]
        order = tuple(_CLASSES[i] for i in (first, second)[:n])
        picked, rest = tuple(numbers[11 : 11 + picks]), numbers[11 + picks :]
        said = bool(waiting), bool(mixed), bool(room)
        return cls(order, picked, tuple(rest[:longs]), tokens, layers, threshold, *said)
