"""One decision, its inputs, and its encoding from the leading rank to the other ranks."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from laps_core.length import LONG, SHORT, ClassName

LOOKAHEAD = 512
"""Most waiting requests of a class that a decision considers, and most requests that it picks of a class."""
PLAN_NUMBERS = 11 + 2 * LOOKAHEAD
"""Length of an encoded Plan (whole numbers)."""
Held = Literal["", "window", "memory"]
DecodeTurn = Literal["", "first", "carried"]
_TURNS: tuple[tuple[ClassName, ...], ...] = ((), (SHORT,), (LONG,), (SHORT, LONG), (LONG, SHORT))
_HELD: tuple[Held, ...] = ("", "window", "memory")
_DECODE: tuple[DecodeTurn, ...] = ("", "first", "carried")


class Waiting(NamedTuple):
    """A waiting request, or a long prompt between two of its chunks, as the rules see it. Times are seconds of the
    caller's clock."""

    tokens: int
    """New tokens left."""
    history: int
    """Cached tokens, with the finished chunks of this request."""
    since_s: float
    """Time at which the request started to wait."""
    deadline_s: float | None = None
    """Time at which the first token is due at the scheduler; None without a deadline."""
    new_tokens: int = 0
    """New tokens on arrival; 0: same as `tokens`."""
    started: bool = False
    """True if the prompt is in progress: a chunk of it has run."""
    priority: int = 0
    """Priority among long prompts; smaller values go first, whatever the work."""


class Paused(NamedTuple):
    """The long batch that is paused between two slices."""

    left_s: float
    """Device time that the batch still needs (seconds)."""
    depth: int
    """Number of long batches under way."""
    priority: int = 0
    """Highest priority among the requests of the batch; smaller values are higher."""
    weight: float = 0.0
    """Weight of the requests of the batch (1/seconds), by ``Sizes.weight``."""
    deadlines: tuple[float, ...] = ()
    """Deadlines of the requests of the batch (seconds of the caller's clock)."""
    slice_s: float = 0.0
    """Device time of the next slice (seconds); 0 if unknown."""
    rows: bool = False
    """True if a batch under way carries a row of each stream: their tokens come at its end."""

    def due_s(self, now: float) -> float | None:
        """Return the earliest deadline that the batch meets if it runs on at `now`; if it meets none, the earliest."""
        return min(self.deadlines, key=lambda due_s: (due_s < now + self.left_s, due_s), default=None)


class Account(NamedTuple):
    """Charges and statistics of a plan, for ``Pacer.record_launch``, and the end of a hold; leading rank only."""

    reason: str = ""
    """Why a short batch leaves, one of statistics.REASONS."""
    waited_s: float = 0.0
    """Time for which the window held the short batch (seconds), without queueing before the hold."""
    late: int = 0
    """Number of picked requests that can no longer meet their deadlines."""
    oldest: bool = False
    """True if the long batch contains the prompt that has waited longest, as its first prompt or uncut."""
    oldest_late: bool = False
    """True if the prompt that has waited longest is too late for its deadline."""
    contended: bool = False
    """True if long work waits or is paused."""
    until_s: float = math.inf
    """Time until which short requests are held if no request arrives before (the leading rank's clock)."""


@dataclass(slots=True, kw_only=True)
class Running:
    """A batch on the device. Times are seconds of one clock."""

    cls: ClassName
    shape: list[tuple[int, int]]
    """(new, history) tokens of each request."""
    short: Collection[int] = ()
    """Indices of the short requests of the batch."""
    within: bool = False
    """True if the batch runs while another batch is paused."""
    account: Account = field(default_factory=Account)
    """Statistics and charges from the plan of the batch."""
    started: float | None = None
    """Time at which the batch went to the device."""
    done: float | None = None
    """Time at which the device finished the batch; None: known only when the result is processed."""
    took_s: float | None = None
    """Measured device time, if the time of the end was not measured."""
    paused_s: float = 0.0
    """Device time of other batches while this batch was paused."""
    rows_s: float = 0.0
    """Predicted time of the rows of streams that the batch carries."""
    stock: bool = True
    """True if the latency model may learn from the batch: no graph of LAPS replayed it."""

    @property
    def preempts(self) -> bool:
        """True for a short batch if long work waits or is paused."""
        return self.cls == SHORT and self.account.contended


class DecodeStep(NamedTuple):
    """A separate decode step on the device. Times are seconds of one clock."""

    launched_s: float
    took_s: float
    """Predicted device time."""


class LongBatch(NamedTuple):
    """The next batch of long prompts."""

    picked: tuple[int, ...] = ()
    """Indices into the long prompts that the decision was given, in service order."""
    tokens: int = 0
    """New tokens; 0: as many as the server's chunk holds."""
    layers: int = 0
    """Layers per slice; 0: the batch runs in one piece."""
    parts: int = 1
    """Slices per layer, if one layer takes longer than a slice should."""


class Plan(NamedTuple):
    """One decision."""

    order: tuple[ClassName, ...]
    """Classes to try, in this order; empty: run nothing now, or resume the paused batch."""
    picked: tuple[int, ...] = ()
    """Short requests to take first, as indices into the short view; all other short requests follow in their order."""
    long: LongBatch = LongBatch()
    threshold: int = 0
    """Longest short request from the next round on (tokens)."""
    mixed: bool = False
    """True if the picked short requests share the long batch's step: this pays, or the batch cannot pause (Medha)."""
    split: bool = False
    """True if only the picked short requests may run: more would make the next decode step late, or delay a crowd."""
    held: Held = ""
    """Reason why waiting short requests are held back: the window has not ended, or a long prompt lacks memory and
    nothing new may start in its place."""
    decode: DecodeTurn = ""
    """Decode step of the plan. first: a step of the running batch goes first. carried: the batch of the first class in
    ``order`` carries a row of each stream, and so is a decode step, too."""
    account: Account = Account()

    def numbers(self) -> list[int]:
        """Return the decision as PLAN_NUMBERS whole numbers."""
        kinds = [_TURNS.index(self.order), _HELD.index(self.held), _DECODE.index(self.decode)]
        longs, *sizes = self.long
        head = [*kinds, int(self.mixed), int(self.split), self.threshold, *sizes, len(self.picked), len(longs)]
        return [*head, *self.picked, *longs] + [0] * (2 * LOOKAHEAD - len(self.picked) - len(longs))

    @classmethod
    def of(cls, numbers: Sequence[int]) -> Plan:
        turn, held, decode, mixed, split, threshold, *sizes, picks, longs = numbers[:11]
        both = tuple(numbers[11 : 11 + picks + longs])
        flags = bool(mixed), bool(split), _HELD[held], _DECODE[decode]
        return cls(_TURNS[turn], both[:picks], LongBatch(both[picks:], *sizes), threshold, *flags)
