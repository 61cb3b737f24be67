"""Receipts of the last requests, ready to be sent."""

from __future__ import annotations

from collections import deque
from itertools import takewhile

import msgspec

from laps_core.length import ClassName
from laps_core.receipts.receipt import AT_PREFILL, LONGEST_ID

MOST = 10_000
"""Requests that are remembered."""


class Entry(msgspec.Struct, gc=False, frozen=True, kw_only=True):
    """Request that had its first token, or ended without a token. Microseconds of the ledger's clock; None: never."""

    rid: str
    cls: ClassName
    new_tokens: int
    arrived_us: int
    end_us: int
    first_us: int | None
    """Start of the request's first batch."""
    last_us: int | None
    """End of the request's last batch."""
    transferred_us: int | None
    aborted: bool
    receipt: bytes = b""
    """``Receipt`` as JSON."""


class Query(msgspec.Struct, frozen=True, kw_only=True):
    """Selection of receipts; None: no restriction."""

    rid: str | None = None
    slowest: int | None = None
    """Number of receipts, longest time to first token first; None: all, the oldest first."""
    cls: ClassName | None = None
    seconds: float | None = None
    """Only requests that ended (first token or abort) in the last ``seconds``."""
    timeline: bool = False
    """True: return the timeline of the last ``seconds`` instead of receipts."""


class Recent:
    """Last requests of one scheduler."""

    def __init__(self, most: int = MOST) -> None:
        self._entries: deque[Entry] = deque()
        self._by_rid: dict[str, Entry] = {}
        self._most = most

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, entry: Entry) -> None:
        if len(self._entries) == self._most:
            oldest = self._entries.popleft()
            if self._by_rid.get(oldest.rid) is oldest:
                del self._by_rid[oldest.rid]
        self._entries.append(entry)
        self._by_rid[entry.rid] = entry

    def since(self, begin_us: int) -> list[Entry]:
        """Return requests that ended at `begin_us` or later, the oldest first."""
        return list(takewhile(lambda entry: entry.end_us >= begin_us, reversed(self._entries)))[::-1]

    def find(self, query: Query, now_us: int) -> list[Entry]:
        if query.rid is not None:
            ids = query.rid, query.rid + AT_PREFILL
            known = next((entry for rid in ids if (entry := self._by_rid.get(rid[:LONGEST_ID]))), None)
            return [] if known is None else [known]
        found = list(self._entries) if query.seconds is None else self.since(now_us - round(query.seconds * 1e6))
        if query.cls is not None:
            found = [entry for entry in found if entry.cls == query.cls]
        if query.slowest is not None:
            found = sorted(found, key=lambda entry: entry.arrived_us - entry.end_us)[: query.slowest]
        return found
