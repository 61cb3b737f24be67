"""One decision, what it is made from, and how it travels from the leading rank to the others."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from laps_core.length import LONG, SHORT, ClassName

LOOKAHEAD = 512
"""Waiting requests of a class that are looked at; no batch of them is longer than this."""
PLAN_NUMBERS = 11 + 2 * LOOKAHEAD
"""Length of a Plan in whole numbers."""
Held = Literal["", "window", "memory"]
DecodeTurn = Literal["", "first", "carried"]
_TURNS: tuple[tuple[ClassName, ...], ...] = ((), (SHORT,), (LONG,), (SHORT, LONG), (LONG, SHORT))
_HELD: tuple[Held, ...] = ("", "window", "memory")
_DECODE: tuple[DecodeTurn, ...] = ("", "first", "carried")


class Waiting(NamedTuple):
    """A request that waits, or a long prompt between two of its chunks, as every rule sees it. Times are seconds of the
    caller's clock."""

    tokens: int
    """New tokens left."""
    history: int
    """Tokens in the cache, its own finished chunks included."""
    since_s: float
    """When it began to wait."""
    deadline_s: float | None = None
    """When its first token is due, where this is decided."""
    new_tokens: int = 0
    """Tokens to prefill when it came; 0 = what is left."""
    started: bool = False
    """In progress: it has run a chunk."""
    priority: int = 0
    """Priority among long prompts; smaller goes first, whatever the work."""


class Paused(NamedTuple):
    """The batch of long work that is paused between two slices."""

    left_s: float
    """Device time that it still needs (seconds)."""
    depth: int
    """Batches of long work under way."""
    priority: int = 0
    """Highest priority among their requests; smaller is higher."""
    weight: float = 0.0
    """Weight of its requests (1/seconds), by ``Sizes.weight``."""
    deadline_s: float | None = None
    """The earliest of their deadlines (the caller's clock)."""
    slice_s: float = 0.0
    """Device time of its next slice (seconds); 0 = unknown."""


class Account(NamedTuple):
    """Statistics and charges of a plan, for ``Pacer.launched``, and its time. They stay on the leading rank."""

    reason: str = ""
    """Why a short batch leaves, one of statistics.REASONS."""
    waited_s: float = 0.0
    """How long the window held it (not the queueing before it)."""
    late: int = 0
    """How many of those picked can no longer make their deadline."""
    oldest: bool = False
    """The long batch holds the prompt that has waited longest, first in it or whole."""
    oldest_late: bool = False
    """The prompt that has waited longest is too late for its deadline."""
    contended: bool = False
    """Long work waits or is paused."""
    until_s: float = math.inf
    """Until when short requests are held, if nothing comes before (the leading rank's clock)."""


@dataclass(slots=True, kw_only=True)
class Running:
    """A batch on the device. Times are seconds of one clock."""

    cls: ClassName
    shape: list[tuple[int, int]]
    """(new, history) tokens of each request."""
    short: Collection[int] = ()
    """Which of its requests are short."""
    within: bool = False
    """True if it runs while another is paused."""
    account: Account = field(default_factory=Account)
    """Charges, from its plan."""
    started: float | None = None
    """When it went to the device."""
    done: float | None = None
    """When its device work was done; None = known only when its result is processed."""
    took_s: float | None = None
    """Device time that was measured, where the moment of its end was not."""
    paused_s: float = 0.0
    """Device time that others had meanwhile."""
    rows_s: float = 0.0
    """Predicted time of the rows of streams that run in it (seconds)."""
    stock: bool = True
    """The latency model may learn from it: it was not replayed from a graph of LAPS."""

    @property
    def preempts(self) -> bool:
        """True for a short batch while long work waits or is paused."""
        return self.cls == SHORT and self.account.contended


class LongBatch(NamedTuple):
    """The next batch of long prompts."""

    picked: tuple[int, ...] = ()
    """Indices into those given, in order."""
    tokens: int = 0
    """New tokens; 0 = what the server's chunk holds."""
    layers: int = 0
    """Layers a slice; 0 = in one piece."""
    parts: int = 1
    """Slices a layer, where one layer takes longer than a slice should."""


class Plan(NamedTuple):
    """One decision."""

    order: tuple[ClassName, ...]
    """Classes to try, in turn; empty = run nothing now, or go on with what is paused."""
    picked: tuple[int, ...] = ()
    """Short requests to take first, as indices into the short view; the others follow in their own order."""
    long: LongBatch = LongBatch()
    threshold: int = 0
    """Longest short request from the next round on (tokens)."""
    mixed: bool = False
    """The short requests picked share the step of the long batch: that serves everybody sooner, or it cannot make way
    for them (Medha)."""
    split: bool = False
    """No other short requests than those picked: more would make the next decode step late."""
    held: Held = ""
    """Why short requests that wait are held back: until the window ends, or as a long prompt is owed the memory that it
    lacks, and nothing new starts in its place."""
    decode: DecodeTurn = ""
    """A decode step of the running batch goes first, or the batch of the first class in ``order`` carries a row of each
    stream, so that it is a decode step, too."""
    account: Account = Account()

    def numbers(self) -> list[int]:
        """The decision as PLAN_NUMBERS whole numbers."""
        kinds = [_TURNS.index(self.order), _HELD.index(self.held), _DECODE.index(self.decode)]
        longs, *sizes = self.long
        head = [*kinds, int(self.mixed), int(self.split), self.threshold, *sizes, len(self.picked), len(longs)]
        return [*head, *self.picked, *longs] + [0] * (2 * LOOKAHEAD - len(self.picked) - len(longs))

    @classmethod
    def of(cls, numbers: Sequence[int]) -> Plan:
        """Undo ``numbers``."""
        turn, held, decode, mixed, split, threshold, *sizes, picks, longs = numbers[:11]
        both = tuple(numbers[11 : 11 + picks + longs])
        flags = bool(mixed), bool(split), _HELD[held], _DECODE[decode]
        return cls(_TURNS[turn], both[:picks], LongBatch(both[picks:], *sizes), threshold, *flags)
