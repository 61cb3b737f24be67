"""Sums of blocks of a ledger's pieces, so that the receipt of a long wait need not visit each piece."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from heapq import nlargest
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from laps_core.length import CLASSES, SHORT, ClassName

if TYPE_CHECKING:
    from laps_core.receipts.receipt import Cause
    from laps_core.receipts.run import Hold, Run

NAMED = 8
"""Most requests that a receipt names in ``behind``."""
SIZE = 64
"""Pieces of a block."""
DETAIL = 2048
"""Most pieces of a wait whose requests are named and counted."""

Kind = str | None
"""Class of the running batch; None: decode step; "idle": no batch."""
Piece = tuple[int, int, "Run | None"]
Sums = dict[tuple["Cause | None", Kind], int]
"""Microseconds by the cause that holds a class back, and by what the device does."""


class Others(NamedTuple):
    """Batches of other requests."""

    runs: Sequence[tuple[Run, int]]
    """Batches with their time: the NAMED longest short ones, and those of which a part is outside of this period."""
    longs: dict[str, tuple[int, int]]
    """Time and new tokens of each request of all other long batches."""
    more: int
    """Number of all other short requests."""


class Block(NamedTuple):
    """Pieces that follow each other, and idle time between them."""

    begin_us: int
    end_us: int
    before: dict[ClassName, Sums]
    """Sums of all blocks before this one."""
    others: Others


class Stretch(NamedTuple):
    """Time that whole blocks cover."""

    begin_us: int
    end_us: int
    sums: Sums
    others: Others
    """The last DETAIL pieces at most."""


class Blocks:
    """The oldest pieces of a ledger, all of them in blocks of the same size."""

    def __init__(self, size: int = SIZE) -> None:
        self.size = size
        self._blocks: list[Block] = []
        self._sums: dict[ClassName, Sums] = {cls: {} for cls in CLASSES}
        self._known: tuple[tuple[int, int], Others] | None = None
        """Others of blocks from a first one to a last one. Requests of one batch often ask for the same."""

    @property
    def count(self) -> int:
        return len(self._blocks) * self.size

    def add(self, pieces: Sequence[Piece], held: dict[ClassName, list[Hold]]) -> None:
        """Add the next block. `held`: changes of what holds each class back, the first one before the block."""
        before, begin_us, end_us = self._sums, pieces[0][0], pieces[-1][1]
        others = merged(begin_us, end_us, [(run, end - begin) for begin, end, run in pieces if run is not None])
        self._blocks.append(Block(begin_us, end_us, before, others))
        self._sums = {cls: _added(before[cls], pieces, held[cls]) for cls in CLASSES}

    def keep(self, pieces: int) -> None:
        """Forget the blocks of pieces after the first `pieces`."""
        if pieces < self.count:
            first = pieces // self.size
            self._sums = self._blocks[first].before
            del self._blocks[first:]
            self._known = None

    def forget(self, blocks: int) -> None:
        del self._blocks[:blocks]
        self._known = None

    def between(self, cls: ClassName, begin_us: int, end_us: int) -> Stretch | None:
        """Return the blocks wholly within a period, with what held back this class; None: there is none."""
        known = self._blocks
        first, end = (bisect_left(known, us, key=lambda block: block.begin_us) for us in (begin_us, end_us))
        # The last block that begins in the period can end after it.
        end -= end > first and known[end - 1].end_us > end_us
        if first >= end:
            return None
        before, after = known[first].before[cls], (known[end].before if end < len(known) else self._sums)[cls]
        sums = {key: us - before.get(key, 0) for key, us in after.items()}
        others = self._others(max(first, end - max(1, DETAIL // self.size)), end)
        return Stretch(known[first].begin_us, known[end - 1].end_us, sums, others)

    def _others(self, first: int, end: int) -> Others:
        if self._known is None or self._known[0] != (first, end):
            blocks = self._blocks[first:end]
            found = merged(blocks[0].begin_us, blocks[-1].end_us, (), [block.others for block in blocks])
            self._known = (first, end), found
        return self._known[1]


def merged(begin_us: float, end_us: float, runs: Iterable[tuple[Run, int]], parts: Sequence[Others] = ()) -> Others:
    """Return the others of a period: `runs`, with their time, and those of `parts` of the period."""
    ran: dict[int, int] = {}
    known: dict[int, Run] = {}
    for run, us in chain(runs, *(part.runs for part in parts)):
        if run.cls is not None:
            at = id(run)
            ran[at] = ran.get(at, 0) + us
            known[at] = run
    longs: dict[str, tuple[int, int]] = {}
    shorts, kept, more = list[int](), set[int](), sum([part.more for part in parts])
    for at, run in known.items():
        if run.begin_us < begin_us or run.end_us is None or run.end_us > end_us:
            kept.add(at)
        elif run.cls == SHORT:
            shorts.append(at)
        else:
            more += run.more
            for rid, new in zip(run.rids, run.tokens, strict=True):
                _add(longs, rid, ran[at], new)
    for part in parts:
        for rid, (us, new) in part.longs.items():
            _add(longs, rid, us, new)
    # A short request runs in one batch only, so the NAMED longest short batches are enough. A long prompt can run in
    # several batches, whose times add up.
    longest = nlargest(NAMED, shorts, key=ran.__getitem__)
    more += sum([known[at].request_count for at in shorts]) - sum([known[at].request_count for at in longest])
    return Others([(known[at], ran[at]) for at in (*kept, *longest)], longs, more)


def _add(longs: dict[str, tuple[int, int]], rid: str, us: int, tokens: int) -> None:
    before = longs.get(rid)
    longs[rid] = (us, tokens) if before is None else (before[0] + us, before[1] + tokens)


def _added(before: Sums, pieces: Iterable[Piece], held: Sequence[Hold]) -> Sums:
    sums, at, last = defaultdict(int, before), 0, len(held) - 1
    for begin, end, run in pieces:
        kind: Kind = "idle" if run is None else run.cls
        while begin < end:
            while at < last and held[at + 1].since_us <= begin:
                at += 1
            until = min(end, held[at + 1].since_us) if at < last else end
            sums[held[at].cause, kind] += until - begin
            begin = until
    return dict(sums)
