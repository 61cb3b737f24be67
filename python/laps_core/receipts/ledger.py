"""Ledger of the device's time: disjoint pieces, each with its batch or decode step, and the causes that held back each
class of waiting requests. Times are whole microseconds of one clock."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right

from laps_core.length import CLASSES, ClassName
from laps_core.receipts.blocks import DETAIL, SIZE, Blocks, Stretch
from laps_core.receipts.receipt import Cause
from laps_core.receipts.run import FREE, Hold, Run

MOST = 100_000
"""Most pieces, and most changes of causes, that are remembered."""


def whole_us(seconds: float) -> int:
    """Convert seconds to whole microseconds."""
    return round(seconds * 1e6)


class Ledger:
    """Last pieces of the device's time, and last changes of the cause that holds each class back."""

    def __init__(self, most: int = MOST, block: int = SIZE) -> None:
        """`block`: pieces of a block."""
        self._most, self._blocks = most, Blocks(block)
        self._begins, self._ends, self._runs = array("q"), array("q"), list[Run]()
        self._open: list[Run] = []
        self._held: dict[ClassName, list[Hold]] = {cls: [FREE] for cls in CLASSES}

    def __len__(self) -> int:
        return len(self._runs)

    # -- events

    def record_start(self, run: Run) -> None:
        """Record that this batch goes to the device."""
        self._open.append(run)

    def record_end(self, run: Run, begin_us: int, end_us: int) -> None:
        """Record that a batch had the device, except for batches in its pauses, which must be recorded before. The time
        of other batches is not changed: if the last of them ended after `begin_us`, this batch starts at that end."""
        self._open = [other for other in self._open if other is not run]
        begins, ends, runs = self._begins, self._ends, self._runs
        first = len(runs)
        while first and ends[first - 1] > begin_us:
            if runs[first - 1].depth <= run.depth:
                begin_us = ends[first - 1]
                break
            first -= 1
        run.begin_us, run.end_us = begin_us, max(begin_us, end_us)
        inner = list(zip(begins[first:], ends[first:], runs[first:], strict=True))
        del begins[first:], ends[first:], runs[first:]
        self._blocks.keep(first)
        at = begin_us
        for begin, end, other in inner:
            if begin > at:
                self._add(at, begin, run)
            self._add(begin, end, other)
            at = max(at, end)
        if end_us > at:
            self._add(at, end_us, run)
        last = zip(begins[first:], ends[first:], runs[first:], strict=True)
        run.own_us += sum(end - begin for begin, end, of in last if of is run)
        if (over := len(runs) - self._most) > self._most // 50:
            blocks = -(-over // self._blocks.size)
            self._blocks.forget(blocks)
            over = blocks * self._blocks.size
            del begins[:over], ends[:over], runs[:over]
            for known in self._held.values():
                # What held a class back before the pieces that are left matters no more.
                del known[1 : max(1, bisect_right(known, begins[0], key=lambda hold: hold.since_us) - 1)]
        self._add_blocks()

    def _add_blocks(self) -> None:
        """Add blocks of pieces that no batch on the device can change, and of those older than DETAIL in any case."""
        blocks, ends = self._blocks, self._ends
        while (end := blocks.count + blocks.size) < len(ends):
            open_us = min((run.begin_us for run in self._open), default=math.inf)
            if ends[end - 1] > open_us and len(ends) - end < DETAIL:
                return
            first, end_us = end - blocks.size, ends[end - 1]
            begin_us = ends[first - 1] if first else self._begins[0]
            held = {cls: self.holds_between(cls, begin_us, end_us) for cls in CLASSES}
            blocks.add(self.pieces(begin_us, end_us), held)

    def _add(self, begin_us: int, end_us: int, run: Run) -> None:
        self._begins.append(begin_us)
        self._ends.append(end_us)
        self._runs.append(run)

    def record_hold(self, now_us: int, cls: ClassName, cause: Cause | None, *, waits: bool) -> None:
        """Record the cause that holds back a class from now on. An unchanged cause takes no memory."""
        known = self._held[cls]
        if (known[-1].cause, known[-1].waits) == (cause, waits):
            return
        known.append(Hold(max(now_us, known[-1].since_us), cause, waits))
        if len(known) > self._most + self._most // 50:
            del known[: len(known) - self._most]

    # -- queries

    def pieces(self, begin_us: int, end_us: int) -> list[tuple[int, int, Run | None]]:
        """Return the pieces from `begin_us` to `end_us`, in order: start, end, and the batch that had the device; None
        = idle. Time that no ended batch had goes to batches that still run, the most deeply nested first."""
        found: list[tuple[int, int, Run | None]] = []
        if end_us <= begin_us:
            return found
        first = bisect_right(self._ends, begin_us)
        last = bisect_left(self._begins, end_us, first)
        at = begin_us
        # A long wait covers thousands of pieces, so avoid a function call for each.
        for begin, end, run in zip(
            self._begins[first:last], self._ends[first:last], self._runs[first:last], strict=True
        ):
            if begin > at:
                found += self._between(at, begin)
                at = begin
            found.append((at, end, run))
            at = end
        if at > end_us:
            begin, _, run_ = found[-1]
            found[-1] = begin, end_us, run_
        elif at < end_us:
            found += self._between(at, end_us)
        return found

    def _between(self, begin_us: int, end_us: int) -> list[tuple[int, int, Run | None]]:
        """Return the pieces of a period that no ended batch had."""
        if not self._open:
            return [(begin_us, end_us, None)]
        found: list[tuple[int, int, Run | None]] = []
        for run in sorted(self._open, key=lambda run: (-run.depth, run.begin_us)):
            since = max(begin_us, run.begin_us)
            if since < end_us:
                found.append((since, end_us, run))
                end_us = since
        if begin_us < end_us:
            found.append((begin_us, end_us, None))
        return found[::-1]

    def stretch(self, cls: ClassName, begin_us: int, end_us: int) -> Stretch | None:
        """Return the sums of most of a long period, with what held back this class; None if the period is short."""
        return self._blocks.between(cls, begin_us, end_us)

    def holds_between(self, cls: ClassName, begin_us: int, end_us: int) -> list[Hold]:
        """Return the causes that held a class back in a period. The first entry can be older than the period."""
        known = self._held[cls]
        first = max(0, bisect_right(known, begin_us, key=lambda h: h.since_us) - 1)
        return known[first : max(first + 1, bisect_left(known, end_us, key=lambda h: h.since_us))]
