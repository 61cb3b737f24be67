"""Causes of one request's time to first token: its own moments, laid over what the device did meanwhile.

Each microsecond from its arrival to its first token has one cause, so that causes add up to the time.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from laps_core.length import LONG, SHORT, ClassName
from laps_core.receipts.ledger import Held, Ledger, Piece, Run
from laps_core.receipts.receipt import Behind, Cause

NAMED = 8
"""Requests that a receipt names as those it waited behind."""


class Wait(NamedTuple):
    """A stretch in which a request could not have run, whatever the device did."""

    begin_us: int
    end_us: int
    cause: Cause


class Moments(msgspec.Struct, kw_only=True):
    """When a request was where. Microseconds of the ledger's clock; None: it was not there, or nobody knows."""

    rid: str
    cls: ClassName
    arrived_us: int
    """The HTTP server had it."""
    end_us: int
    """The first token is on its way, or it ended without one."""
    sent_us: int | None = None
    """Tokenized, and sent to the scheduler."""
    received_us: int | None = None
    """The scheduler has taken it in."""
    asked_us: int | None = None
    """Since then it waits for a decode server."""
    waits_us: int | None = None
    """From now on it could run."""
    ready_us: int | None = None
    """A decode server had memory for it; it may have run before."""
    transferred_us: int | None = None
    """The decode server has its KV cache."""
    runs: Sequence[Run] = ()
    """The batches that it is in, in order."""
    blocked: Sequence[Wait] = ()
    """In order."""


class Account(NamedTuple):
    """The time of one request."""

    causes_us: dict[Cause, int]
    """Causes of no time are left out."""
    behind: tuple[Behind, ...]
    left_out: int


def account(m: Moments, ledger: Ledger) -> Account:
    """Return where the time of a request went. In so many steps as batches ran meanwhile."""
    found = _Overlay(m, ledger)
    runs = [run for run in m.runs if run.begin_us < m.end_us]
    first_us = runs[0].begin_us if runs else None
    last_us = max((run.end_us or m.end_us for run in runs), default=None)
    found.all_until(m.sent_us, "tokenizing")
    found.overlaid_until(m.received_us, "tokenizing")
    queued_us = _first(m.waits_us, first_us)
    found.all_until(_first(m.asked_us, queued_us), "tokenizing")
    found.all_until(_first(queued_us, None if m.asked_us is None else m.end_us), "decode_room")
    if last_us is None:
        # It never ran: what it waited for is all there is.
        found.overlaid_until(m.end_us, "other" if m.waits_us is None else "scheduling")
        return found.account()
    found.overlaid_until(last_us, "scheduling")
    found.all_until(m.ready_us, "decode_room")
    found.all_until(m.transferred_us, "transfer")
    found.all_until(m.end_us, "answering")
    return found.account()


def _first(*moments: int | None) -> int | None:
    return next((us for us in moments if us is not None), None)


class _Overlay:
    """One request, on its way through its moments."""

    def __init__(self, m: Moments, ledger: Ledger) -> None:
        self._m, self._ledger, self._at = m, ledger, m.arrived_us
        self._own = {id(run): run for run in m.runs}
        self._first_us: float = m.runs[0].begin_us if m.runs else math.inf
        self._causes: defaultdict[Cause, int] = defaultdict(int)
        self._others: dict[int, tuple[Run, int]] = {}

    def all_until(self, until_us: int | None, cause: Cause) -> None:
        """Take the time until then for one cause; None: that moment never came."""
        if until_us is not None and (until := min(until_us, self._m.end_us)) > self._at:
            self._causes[cause] += until - self._at
            self._at = until

    def overlaid_until(self, until_us: int | None, idle: Cause) -> None:
        """Take the time until then for what the device did; `idle`: nothing, and nothing holds the request back."""
        if until_us is None or (until := min(until_us, self._m.end_us)) <= self._at:
            return
        held = self._ledger.held(self._m.cls, self._at, until)
        at = 0
        for piece in self._ledger.pieces(self._at, until):
            while at + 1 < len(held) and held[at + 1].since_us <= piece.begin_us:
                at += 1
            self._piece(piece, held, at, idle)
        self._at = until

    def _piece(self, piece: Piece, held: list[Held], at: int, idle: Cause) -> None:
        begin, end, run = piece
        if run is not None:
            if id(run) in self._own:
                self._causes["computing"] += end - begin
                return
            if run.rids:
                known = self._others.get(id(run))
                self._others[id(run)] = run, (known[1] if known else 0) + end - begin
            if begin >= self._first_us and self._within(begin):
                self._causes["preempted"] += end - begin
                return
        if not self._m.blocked and (at + 1 == len(held) or held[at + 1].since_us >= end):
            self._causes[_cause(run, held[at].cause, idle)] += end - begin
            return
        for part_begin, part_end, blocked in self._apart(begin, end):
            while part_begin < part_end:
                while at + 1 < len(held) and held[at + 1].since_us <= part_begin:
                    at += 1
                until = min(part_end, held[at + 1].since_us) if at + 1 < len(held) else part_end
                self._causes[blocked or _cause(run, held[at].cause, idle)] += until - part_begin
                part_begin = until

    def _within(self, at_us: int) -> bool:
        """Return True if a batch of its own was under way."""
        return any(run.begin_us <= at_us and (run.end_us is None or at_us < run.end_us) for run in self._m.runs)

    def _apart(self, begin_us: int, end_us: int) -> Iterator[tuple[int, int, Cause | None]]:
        """Yield the parts of a stretch, with the cause of those in which this request could not have run."""
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
        """Return what was found."""
        times: defaultdict[str, int] = defaultdict(int)
        tokens: defaultdict[str, int] = defaultdict(int)
        for run, us in self._others.values():
            for rid, new in zip(run.rids, run.tokens, strict=True):
                times[rid] += us
                tokens[rid] += new
        times.pop(self._m.rid, None)
        first = sorted(times.items(), key=lambda item: -item[1])[:NAMED]
        behind = tuple(Behind(rid=rid, tokens=tokens[rid], ms=us / 1e3) for rid, us in first)
        return Account(dict(self._causes), behind, len(times) - len(behind))


def _cause(run: Run | None, held: Cause | None, idle: Cause) -> Cause:
    """Return why a request does not run while `run` does, of a class that this holds back."""
    if held == "memory" or (held is not None and run is None):
        return held
    if run is None:
        return idle
    if run.cls is None:
        return "behind_streams"
    if run.cls == SHORT:
        return "behind_short"
    return "gap" if held == "gap" and run.cls == LONG else "behind_long"
