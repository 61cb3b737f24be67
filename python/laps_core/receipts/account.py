"""Causes of one request's time to first token: its own moments, laid over what the device did meanwhile.

Each microsecond from its arrival to its first token has one cause, so that causes add up to the time.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from heapq import nlargest
from operator import itemgetter
from typing import NamedTuple

import msgspec

from laps_core.length import LONG, SHORT, ClassName
from laps_core.receipts.ledger import Held, Ledger, Run
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
        self._others: list[tuple[Run, int]] = []

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
        at, causes, own, others, first_us = 0, self._causes, self._own, self._others, self._first_us
        blocked, last = self._m.blocked, len(held) - 1
        next_us, why = held[1].since_us if last else math.inf, _causes(held[0].cause, idle)
        # In a long wait thousands of batches run: no call for each.
        for begin, end, run in self._ledger.pieces(self._at, until):
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
                if begin >= first_us and self._within(begin):
                    causes["preempted"] += us
                    continue
            if end <= next_us and not blocked:
                causes[why[kind]] += us
            else:
                self._divide(begin, end, kind, held[at:], idle)
        self._at = until

    def _divide(self, begin: int, end: int, kind: str | None, held: list[Held], idle: Cause) -> None:
        """Take a piece for its causes, where they change within it. `held`: the changes, from the one before it on."""
        for part_begin, part_end, blocked in self._apart(begin, end):
            at = 0
            while part_begin < part_end:
                while at + 1 < len(held) and held[at + 1].since_us <= part_begin:
                    at += 1
                until = min(part_end, held[at + 1].since_us) if at + 1 < len(held) else part_end
                self._causes[blocked or _causes(held[at].cause, idle)[kind]] += until - part_begin
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
        ran: dict[int, int] = {}
        runs: dict[int, Run] = {}
        for run, us in self._others:
            ran[id(run)] = ran.get(id(run), 0) + us
            runs[id(run)] = run
        # A prompt may have several long batches, a short request has one: no other than the longest can name it.
        shorts = [at for at, run in runs.items() if run.cls == SHORT]
        longest = nlargest(NAMED, shorts, key=ran.__getitem__)
        more = sum(len(runs[at].rids) for at in shorts) - sum(len(runs[at].rids) for at in longest)
        times: dict[str, int] = {}
        tokens: dict[str, int] = {}
        for at in (*longest, *(at for at, run in runs.items() if run.cls == LONG)):
            run, us = runs[at], ran[at]
            for rid, new in zip(run.rids, run.tokens, strict=True):
                times[rid] = times.get(rid, 0) + us
                tokens[rid] = tokens.get(rid, 0) + new
        times.pop(self._m.rid, None)
        first = nlargest(NAMED, times.items(), key=itemgetter(1))
        behind = tuple([Behind(rid=rid, tokens=tokens[rid], ms=us / 1e3) for rid, us in first])
        return Account(dict(self._causes), behind, len(times) - len(behind) + more)


@cache
def _causes(held: Cause | None, idle: Cause) -> dict[str | None, Cause]:
    """Return why a request does not run, by the class of what does; None: a decode step, "idle": nothing. `held`: what
    holds its own class back."""
    if held == "memory":
        return dict.fromkeys((SHORT, LONG, None, "idle"), held)
    return {
        SHORT: "behind_short",
        LONG: "gap" if held == "gap" else "behind_long",
        None: "behind_streams",
        "idle": held or idle,
    }
