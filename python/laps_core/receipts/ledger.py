"""Ledger of the device's time: disjoint pieces, each with its batch or decode step, and the causes that held back each
class of waiting requests. Times are whole microseconds of one clock."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from laps_core.length import CLASSES, ClassName
from laps_core.receipts.receipt import Cause

MOST = 100_000
"""Most pieces, and most changes of causes, that are remembered."""
LATE = 2.0
"""A step is marked as late if it took at least this many times its predicted time."""


def whole_us(seconds: float) -> int:
    """Convert seconds to whole microseconds."""
    return round(seconds * 1e6)


class Run(msgspec.Struct, gc=False, kw_only=True):
    """A batch or a decode step on the device."""

    cls: ClassName | None = None
    """None: a decode step."""
    rids: tuple[str, ...] = ()
    tokens: tuple[int, ...] = ()
    """New tokens of each request."""
    cut: str | None = None
    """Request ID of the prompt that has more chunks after this batch."""
    streams: int = 0
    """Streams that a decode step serves, or that have a row in a batch."""
    depth: int = 0
    """Number of batches that are paused while this batch runs."""
    layers: int = 0
    """Layers of a slice; 0 = the batch runs whole."""
    predicted_us: int | None = None
    """None: the latency model is not fitted."""
    begin_us: int
    end_us: int | None = None
    """None: not ended yet."""
    own_us: int = 0
    """Device time, without that of batches in its pauses."""

    @property
    def late(self) -> bool:
        """True if the batch took at least LATE times its predicted time."""
        return self.end_us is not None and bool(self.predicted_us) and self.own_us >= LATE * (self.predicted_us or 0)


class Hold(NamedTuple):
    """Cause that holds a class back, from `since_us` on."""

    since_us: int
    cause: Cause | None
    """None: the class is not held back, or no request of the class waits."""
    waits: bool
    """True if a request of the class waits."""


FREE = Hold(0, None, False)


class Ledger:
    """Last pieces of the device's time, and last changes of the cause that holds each class back."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
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
        at = begin_us
        for begin, end, other in inner:
            if begin > at:
                self._add(at, begin, run)
            self._add(begin, end, other)
            at = max(at, end)
        if end_us > at:
            self._add(at, end_us, run)
        run.own_us += sum(end - begin for begin, end, of in self._last(first) if of is run)
        if len(runs) > self._most + self._most // 4:
            kept = len(runs) - self._most
            del begins[:kept], ends[:kept], runs[:kept]

    def _add(self, begin_us: int, end_us: int, run: Run) -> None:
        self._begins.append(begin_us)
        self._ends.append(end_us)
        self._runs.append(run)

    def _last(self, first: int) -> Iterator[tuple[int, int, Run]]:
        return zip(self._begins[first:], self._ends[first:], self._runs[first:], strict=True)

    def record_hold(self, now_us: int, cls: ClassName, cause: Cause | None, *, waits: bool) -> None:
        """Record the cause that holds back a class from now on. An unchanged cause takes no memory."""
        known = self._held[cls]
        if (known[-1].cause, known[-1].waits) == (cause, waits):
            return
        known.append(Hold(max(now_us, known[-1].since_us), cause, waits))
        if len(known) > self._most + self._most // 4:
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

    def holds_between(self, cls: ClassName, begin_us: int, end_us: int) -> list[Hold]:
        """Return the causes that held a class back in a period. The first entry can be older than the period."""
        known = self._held[cls]
        first = max(0, bisect_right(known, begin_us, key=lambda h: h.since_us) - 1)
        return known[first : max(first + 1, bisect_left(known, end_us, key=lambda h: h.since_us))]
