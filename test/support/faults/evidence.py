"""Record of all faults and their effects on requests, with times; the oracle excuses only recorded faults."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

MARKER = "x-faults-request"
"""Header with a request's number; the router forwards it, so the proxies see which server has which request."""

STORM_WORDS = "a storm of the campaign"
"""Message of a 5xx that a proxy made."""
HANG = "hang"
"""Fault: streams stop in the middle, and their connections stay open."""
LONG_PAUSE_S = 9.5
"""Silence after which a router may end a stream (seconds): its own limit is a sixth of --request-timeout-secs, ten
seconds here. A scheduler whose pages come from a slow disk can be silent as long without a fault."""
PROBE_LIMIT_S = 2.9
"""Time without an answer to a probe after which a router may call a server unhealthy (seconds); the router's limit is 3
here. A stock decode scheduler can stall longer, because its queries to prefill servers block for five seconds each."""
DIED = "died"
"""Event: a kept connection brought a request to a server that accepts no requests any more.
To the router it looks as if the request killed the server."""
DEADLY = frozenset(("kill", "reset", "silent", "stop", HANG))
"""Faults that may end a running stream."""
REFUSING = frozenset(("kill", "refuse"))
"""Faults that leave no trace of a request, because the server accepts no connection."""


@dataclass(frozen=True, slots=True)
class RequestEvent:
    """Event of one request at one server. ``at``: monotonic seconds."""

    at: float
    server: str
    what: str
    """"sent", "answered 400", "reset", "storm", "silent", "hang"."""


@dataclass(slots=True)
class FaultWindow:
    """Time of a fault (monotonic seconds; end None while the fault lasts)."""

    kind: str
    server: str
    """Server with the fault; empty for a fault of a router."""
    begin: float
    end: float | None = None

    def touches(self, begin: float, end: float, after_s: float = 0.0) -> bool:
        """Return True if the fault, prolonged by ``after_s`` (seconds), overlaps [begin, end]."""
        return self.begin <= end and (self.end is None or self.end + after_s >= begin)


@dataclass
class Evidence:
    """Record written by proxies and faults, and read by the oracle."""

    clock: Callable[[], float] = time.monotonic
    windows: list[FaultWindow] = field(default_factory=list)
    _hits: dict[int, list[RequestEvent]] = field(default_factory=lambda: defaultdict(list))
    _passed: dict[int, tuple[str, float, float]] = field(default_factory=dict)
    """Request number -> (streaming server, time of its latest chunk, longest pause between its chunks)."""

    def note(self, marker: int | None, server: str, what: str) -> None:
        """Record an event of a request; requests without a number are ignored."""
        if marker is not None:
            self._hits[marker].append(RequestEvent(self.clock(), server, what))

    def record_chunk(self, marker: int | None, server: str) -> None:
        """Record a chunk of a stream on its way to the router."""
        if marker is not None:
            now = self.clock()
            whose, last, longest = self._passed.get(marker, ("", now, 0.0))
            self._passed[marker] = server, now, max(longest, now - last) if whose == server else 0.0

    def record_long_pause(self, marker: int, end: float) -> bool:
        """Return True if a stream that had begun paused for ``LONG_PAUSE_S`` or longer before ``end``. Record the pause
        as a fault of the server."""
        server, last, longest = self._passed.get(marker, ("", end, 0.0))
        still = max(longest, end - last) >= LONG_PAUSE_S
        if still:
            self.windows.append(FaultWindow("still", server, min(last, end - longest), end))
        return still

    def record_probe(self, server: str, begin: float) -> None:
        """Record a stalled server if ``PROBE_LIMIT_S`` or more have passed since the probe sent at ``begin``."""
        now = self.clock()
        if now - begin >= PROBE_LIMIT_S:
            self.windows.append(FaultWindow("still", server, begin, now))

    def hits(self, marker: int) -> list[RequestEvent]:
        """Return all events of one request."""
        return self._hits.get(marker, [])

    @contextmanager
    def window(self, kind: str, server: str = "") -> Iterator[FaultWindow]:
        """Record a fault that lasts as long as the block."""
        window = FaultWindow(kind, server, self.clock())
        self.windows.append(window)
        try:
            yield window
        finally:
            window.end = self.clock()

    def active(self, begin: float, end: float, after_s: float = 0.0) -> list[FaultWindow]:
        """Return the faults that touch [begin, end]."""
        return [w for w in self.windows if w.touches(begin, end, after_s)]

    def fault_that_ended(self, marker: int, begin: float, end: float, servers: Collection[str]) -> str | None:
        """Return the fault that may have ended a stream of ``servers``, in words; None if there was none."""
        hits = [h for h in self.hits(marker) if h.server in servers]
        for h in hits:
            if h.what in DEADLY and h.at <= end:
                return f"{h.what} of {h.server}"
        for h in hits:
            for w in self.windows:
                if w.server == h.server and w.kind in DEADLY and w.touches(max(begin, h.at), end):
                    return f"{w.kind} of {w.server}"
        return None

    def hang_time(self, marker: int) -> float | None:
        """Return the time when the stream was made to hang (monotonic seconds); None if it was not."""
        return next((h.at for h in self.hits(marker) if h.what == HANG), None)

    def faulty_servers(self, marker: int, begin: float, end: float) -> set[str]:
        """Return servers whose faults affected this request: by its events, or newly refusing, unseen by the router."""
        traced = {h.server for h in self.hits(marker) if h.what in DEADLY or h.what == "storm"}
        for h in self.hits(marker):
            traced |= {w.server for w in self.windows if w.server == h.server and w.touches(h.at, end)}
        fresh = (w for w in self.windows if w.kind in REFUSING and begin - 1.0 <= w.begin <= end)
        return traced | {w.server for w in fresh}
