"""Causes of one request's time to first token, from the request's own moments and what the device did meanwhile.

Each microsecond from the request's arrival to its first token has one cause, so the causes add up to the whole time.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from heapq import nlargest
from operator import itemgetter
from typing import NamedTuple

import msgspec

from laps_core.length import LONG, SHORT, ClassName
from laps_core.receipts.blocks import NAMED, Others, Stretch, merged
from laps_core.receipts.ledger import Ledger
from laps_core.receipts.receipt import Behind, Cause
from laps_core.receipts.run import Hold, Run


class Wait(NamedTuple):
    """Period in which a request could not run, independent of the device."""

    begin_us: int
    end_us: int
    cause: Cause


class Moments(msgspec.Struct, kw_only=True):
    """Times at which a request reached each stage (microseconds of the ledger's clock); None = never, or unknown."""

    rid: str
    cls: ClassName
    arrived_us: int
    """Arrival at the HTTP server."""
    end_us: int
    """First token sent, or end of the request without a token."""
    sent_us: int | None = None
    """Tokenized and sent to the scheduler."""
    received_us: int | None = None
    """Received by the scheduler."""
    asked_us: int | None = None
    """Start of the wait for a decode server."""
    waits_us: int | None = None
    """Entry into the waiting queue: the request can run from now on."""
    ready_us: int | None = None
    """A decode server has memory for the request, which can have run before."""
    transferred_us: int | None = None
    """The decode server has the request's KV cache."""
    runs: Sequence[Run] = ()
    """Batches of the request, in order."""
    blocked: Sequence[Wait] = ()
    """Periods in which the request could not run, in order."""


class Account(NamedTuple):
    """Account of the time of one request."""

    causes_us: dict[Cause, int]
    """Microseconds of each cause, without causes of 0."""
    behind: tuple[Behind, ...]
    left_out: int


def account(m: Moments, ledger: Ledger) -> Account:
    """Return where the time of a request went. The cost grows with the request's own batches, but not with
    the other batches that ran before each of them."""
    found = _Overlay(m, ledger)
    runs = [run for run in m.runs if run.begin_us < m.end_us]
    first_us = runs[0].begin_us if runs else None
    last_us = max((run.end_us or m.end_us for run in runs), default=None)
    found.assign_until(m.sent_us, "tokenizing")
    found.assign_by_device_until(m.received_us, "tokenizing")
    queued_us = _first(m.waits_us, first_us)
    found.assign_until(_first(m.asked_us, queued_us), "tokenizing")
    found.assign_until(_first(queued_us, None if m.asked_us is None else m.end_us), "decode_room")
    if last_us is None:
        # The request never ran: all of its time is waiting.
        found.assign_by_device_until(m.end_us, "other" if m.waits_us is None else "scheduling")
        return found.account()
    found.assign_by_device_until(last_us, "scheduling")
    found.assign_until(m.ready_us, "decode_room")
    found.assign_until(m.transferred_us, "transfer")
    found.assign_until(m.end_us, "answering")
    return found.account()


def _first(*moments: int | None) -> int | None:
    return next((us for us in moments if us is not None), None)


class _Overlay:
    """Account of one request in progress: time is assigned to causes from arrival on, moment by moment."""

    def __init__(self, m: Moments, ledger: Ledger) -> None:
        self._m, self._ledger, self._at = m, ledger, m.arrived_us
        self._own = {id(run): run for run in m.runs}
        self._own_begins, self._own_ends = _union(m.runs)
        self._causes: defaultdict[Cause, int] = defaultdict(int)
        self._others: list[tuple[Run, int]] = []
        self._stretches: list[Others] = []

    def assign_until(self, until_us: int | None, cause: Cause) -> None:
        """Assign the time up to `until_us` to one cause; None: that moment never came."""
        if until_us is not None and (until := min(until_us, self._m.end_us)) > self._at:
            self._causes[cause] += until - self._at
            self._at = until

    def assign_by_device_until(self, until_us: int | None, idle: Cause) -> None:
        """Assign the time up to `until_us` to causes by what the device did. `idle`: cause of time in which the device
        was idle and nothing held the request back."""
        if until_us is None or (until := min(until_us, self._m.end_us)) <= self._at:
            return
        for begin, end, blocked in self._parts_between_own(self._at, until):
            whole = self._ledger.stretch(self._m.cls, begin, end)
            if whole is not None:
                self._visit(self._at, whole.begin_us, idle)
                self._add(whole, blocked, idle)
                self._at = whole.end_us
        self._visit(self._at, until, idle)
        self._at = until

    def _parts_between_own(self, begin_us: int, end_us: int) -> Iterator[tuple[int, int, Cause | None]]:
        """Yield the parts of a period without batches of this request; see `_split_by_blocked`."""
        for begin, end in zip((begin_us, *self._own_ends), (*self._own_begins, end_us), strict=True):
            if (since := max(begin, begin_us)) < (until := min(end, end_us)):
                yield from self._split_by_blocked(int(since), int(until))

    def _add(self, whole: Stretch, blocked: Cause | None, idle: Cause) -> None:
        """Assign the time of a stretch. `blocked`: cause if this request could not run."""
        for (held, kind), us in whole.sums.items():
            if us:
                self._causes[blocked or _causes(held, idle)[kind]] += us
        self._stretches.append(whole.others)

    def _visit(self, begin_us: int, end_us: int, idle: Cause) -> None:
        """Assign the time of each piece of a period."""
        held = self._ledger.holds_between(self._m.cls, begin_us, end_us)
        at, causes, own, others = 0, self._causes, self._own, self._others
        first_us = self._own_begins[0] if self._own_begins else math.inf
        blocked, last = self._m.blocked, len(held) - 1
        next_us, why = held[1].since_us if last else math.inf, _causes(held[0].cause, idle)
        # Hundreds of batches can be visited, so avoid a function call for each.
        for begin, end, run in self._ledger.pieces(begin_us, end_us):
            while begin >= next_us:
                at += 1
                next_us = held[at + 1].since_us if at < last else math.inf
                why = _causes(held[at].cause, idle)
            us = end - begin
            if run is None:
                kind: str | None = "idle"
            elif id(run) in own:
                causes["computing"] += us
                continue
            else:
                kind = run.cls
                if kind is not None:
                    others.append((run, us))
                if begin >= first_us and self._own_batch_runs_at(begin):
                    causes["preempted"] += us
                    continue
            if end <= next_us and not blocked:
                causes[why[kind]] += us
            else:
                self._divide(begin, end, kind, held[at:], idle)

    def _divide(self, begin: int, end: int, kind: str | None, held: list[Hold], idle: Cause) -> None:
        """Assign a piece of time in which the cause changes. `held`: changes, starting with the last one before it."""
        for part_begin, part_end, blocked in self._split_by_blocked(begin, end):
            at = 0
            while part_begin < part_end:
                while at + 1 < len(held) and held[at + 1].since_us <= part_begin:
                    at += 1
                until = min(part_end, held[at + 1].since_us) if at + 1 < len(held) else part_end
                self._causes[blocked or _causes(held[at].cause, idle)[kind]] += until - part_begin
                part_begin = until

    def _own_batch_runs_at(self, at_us: int) -> bool:
        """Return True if a batch of this request was under way."""
        found = bisect_right(self._own_begins, at_us) - 1
        return found >= 0 and at_us < self._own_ends[found]

    def _split_by_blocked(self, begin_us: int, end_us: int) -> Iterator[tuple[int, int, Cause | None]]:
        """Yield the parts of a period, with a cause for parts in which this request could not run, else None."""
        for wait in self._m.blocked:
            if wait.end_us <= begin_us or wait.begin_us >= end_us:
                continue
            if wait.begin_us > begin_us:
                yield begin_us, wait.begin_us, None
                begin_us = wait.begin_us
            yield begin_us, min(end_us, wait.end_us), wait.cause
            begin_us = min(end_us, wait.end_us)
        if begin_us < end_us:
            yield begin_us, end_us, None

    def account(self) -> Account:
        found = merged(-math.inf, math.inf, [], [Others(self._others, {}, 0), *self._stretches])
        times = {rid: us for rid, (us, _) in found.longs.items()}
        tokens = {rid: new for rid, (_, new) in found.longs.items()}
        for run, us in found.runs:
            for rid, new in zip(run.rids, run.tokens, strict=True):
                times[rid] = times.get(rid, 0) + us
                tokens[rid] = tokens.get(rid, 0) + new
        times.pop(self._m.rid, None)
        first = nlargest(NAMED, times.items(), key=itemgetter(1))
        behind = tuple([Behind(rid=rid, tokens=tokens[rid], ms=us / 1e3) for rid, us in first])
        more = found.more + sum([run.more for run, _ in found.runs])
        return Account(dict(self._causes), behind, len(times) - len(behind) + more)


def _union(runs: Sequence[Run]) -> tuple[list[float], list[float]]:
    """Return the begins and the ends of the periods that these batches cover."""
    begins: list[float] = []
    ends: list[float] = []
    for run in sorted(runs, key=lambda run: run.begin_us):
        end = math.inf if run.end_us is None else run.end_us
        if ends and run.begin_us <= ends[-1]:
            ends[-1] = max(ends[-1], end)
        else:
            begins.append(run.begin_us)
            ends.append(end)
    return begins, ends


@cache
def _causes(held: Cause | None, idle: Cause) -> dict[str | None, Cause]:
    """Return why a request does not run, by the class of the running batch (None: decode step; "idle": no batch).
    `held`: cause that holds back the request's own class."""
    if held == "memory":
        return dict.fromkeys((SHORT, LONG, None, "idle"), held)
    return {
        SHORT: "behind_short",
        LONG: "gap" if held == "gap" else "behind_long",
        None: "behind_streams",
        "idle": held or idle,
    }
