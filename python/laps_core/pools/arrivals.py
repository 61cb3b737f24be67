"""Arriving work of one server, counted when requests arrive."""

from __future__ import annotations

import math
from heapq import heappop, heappush

from laps_core.latency.step import Coefficients
from laps_core.length import CLASSES, LONG, SHORT, ClassName
from laps_core.pools.pressure import Work
from laps_core.protocol import Bucket, Lengths

BRIEF_S = 0.1
"""Predicted time below which all work of a request counts at its arrival (seconds)."""
ENTRIES = 4096
"""Entries (groups of equal requests) per class that are spread over their predicted time; more count at arrival."""
MOST_WORK_S = 3600.0
"""Most predicted work of one request (seconds): sums stay finite even if a server reports a very slow model."""
MOST_REQUESTS, MOST_TOKENS = 1_000_000, 100_000_000
"""Most requests of one length between two reports of a server, and most tokens of one request."""
LEAST_S = 0.01
"""Least time by which arrived work is divided (seconds)."""


class _Flow:
    """Arriving work of one class."""

    def __init__(self) -> None:
        self._ends: list[tuple[float, int]] = []
        self._rate, self._at, self._total_s = 0, -math.inf, 0.0

    def add(self, now: float, seconds: float, requests: int) -> None:
        """Add ``requests`` that arrive now, each predicted to take ``seconds``."""
        if seconds < BRIEF_S or len(self._ends) >= ENTRIES:
            self._total_s += requests * seconds
            return
        self.total_s(now)
        heappush(self._ends, (now + seconds, requests))
        self._rate += requests

    def total_s(self, now: float) -> float:
        """Return the work counted until ``now`` (seconds)."""
        while self._ends and self._ends[0][0] <= now:
            end, requests = heappop(self._ends)
            self._to(end)
            self._rate -= requests
        self._to(now)
        return self._total_s

    def _to(self, at: float) -> None:
        if self._rate and at > self._at:
            self._total_s += self._rate * (at - self._at)
        self._at = max(self._at, at)


class Arrivals:
    """Predicted work that arrives, in servers. Each request counts as one server, from its arrival on, for its
    predicted time, whether it waits or runs. So the mean is the offered load (Little's law), and one huge prompt never
    counts as more than the one server that it occupies.

    All times are of one clock (seconds): the server's if the server counts its requests, else the caller's.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Forget all arrivals: the server runs a new process, or the clock changes."""
        self._flows = {c: _Flow() for c in CLASSES}
        self._at: float | None = None
        self._seen = self._last = Work()
        self.lengths: Lengths | None = None
        """Requests that the server has counted, by length; None if unknown. Then this router's own requests count."""

    def add(self, now: float, cls: ClassName, seconds: float, requests: int = 1) -> None:
        """Add ``requests`` that arrive now, each predicted to take ``seconds``."""
        self._flows[cls].add(now, min(max(0.0, seconds), MOST_WORK_S), requests)

    def add_counts(self, lengths: Lengths, model: Coefficients, threshold: int) -> None:
        """Add the newly counted requests of all senders. ``threshold``: longest short request (tokens)."""
        before, now = self.lengths, lengths.seconds
        if before is None or now < before.seconds:
            # The server was restarted, or the time of the arrivals is unknown.
            self.forget()
            before = lengths
        self.lengths = lengths
        counted = {b.up_to: b for b in before.buckets}
        for b in lengths.buckets:
            last = counted.get(b.up_to) or Bucket(up_to=b.up_to, requests=0, new_tokens=0, cached_tokens=0)
            n = min(b.requests - last.requests, MOST_REQUESTS)
            if n > 0:
                new = min(max(1, (b.new_tokens - last.new_tokens) // n), MOST_TOKENS)
                cached = min(max(0, (b.cached_tokens - last.cached_tokens) // n), MOST_TOKENS)
                self.add(now, SHORT if new <= threshold else LONG, model.work_s(new, cached), n)

    def since(self, now: float) -> Work:
        """Return the work that arrived since the last call, by class (servers). If no time has passed, return the last
        result again."""
        seen = Work(*(flow.total_s(now) for flow in self._flows.values()))
        if self._at is None:
            self._at, self._seen = now, seen
        elif now > self._at:
            span, before = now - self._at, self._seen
            self._at, self._seen = now, seen
            self._last = Work(*((s - b) / max(span, LEAST_S) for s, b in zip(seen, before, strict=True)))
        return self._last
