"""What was done to servers and to requests, with times: the oracle excuses nothing that does not stand here."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

MARKER = "x-faults-request"
"""Header with a request's number; the router passes it on, so the proxies see which server has which request."""

STORM_WORDS = "a storm of the campaign"
"""What a server's 5xx says where a proxy made it."""
HANG = "hang"
"""Streams stop in the middle, and their connections stay."""
STILL_S = 9.5
"""A stream of which a router hears nothing for this long (seconds) may be ended by it: its own bound is a sixth of
--request-timeout-secs, ten seconds here. Not only faults do that: a scheduler whose pages come from a slow disk."""
PROBED_S = 2.9
"""A server that has no answer to a probe for this long (seconds) is taken to be ill by the router, which waits for
three here. A stock decode scheduler can stand still so long: its questions to prefill servers block, five seconds
each."""
DIED = "died"
"""A kept connection brought a request to a server that accepts none any more: as if it had died of it."""
DEADLY = frozenset(("kill", "reset", "silent", "stop", HANG))
"""Faults that may end a stream that runs."""
REFUSING = frozenset(("kill", "refuse"))
"""Faults that leave no trace of a request: nobody accepts its connection."""


@dataclass(frozen=True, slots=True)
class Hit:
    """Something that happened to one request at one server. ``at``: monotonic seconds."""

    at: float
    server: str
    what: str
    """"sent", "answered 400", "reset", "storm", "silent", "hang"."""


@dataclass(slots=True)
class Window:
    """A fault, from its begin to its end (monotonic seconds; end None: it lasts)."""

    kind: str
    server: str
    """Empty: no server of its own."""
    begin: float
    end: float | None = None

    def touches(self, begin: float, end: float, after_s: float = 0.0) -> bool:
        """Whether it lasted, or had ended at most ``after_s`` before, at any time of [begin, end]."""
        return self.begin <= end and (self.end is None or self.end + after_s >= begin)


@dataclass
class Evidence:
    """Written by proxies and faults, read by the oracle."""

    clock: Callable[[], float] = time.monotonic
    windows: list[Window] = field(default_factory=list)
    _hits: dict[int, list[Hit]] = field(default_factory=lambda: defaultdict(list))
    _passed: dict[int, tuple[str, float, float]] = field(default_factory=dict)
    """By request: the server whose stream goes on, when a piece of it last did, and the longest pause before."""

    def note(self, marker: int | None, server: str, what: str) -> None:
        """Something happened to a request; one without a number is nobody's."""
        if marker is not None:
            self._hits[marker].append(Hit(self.clock(), server, what))

    def passed(self, marker: int | None, server: str) -> None:
        """A piece of a stream went on to the router."""
        if marker is not None:
            now = self.clock()
            whose, last, longest = self._passed.get(marker, ("", now, 0.0))
            self._passed[marker] = server, now, max(longest, now - last) if whose == server else 0.0

    def stood_still(self, marker: int, end: float) -> bool:
        """Whether the router heard nothing of a stream that had begun for ``STILL_S`` up to ``end``: a fault of the
        stream's server from then on."""
        server, last, longest = self._passed.get(marker, ("", end, 0.0))
        still = max(longest, end - last) >= STILL_S
        if still:
            self.windows.append(Window("still", server, min(last, end - longest), end))
        return still

    def probed(self, server: str, begin: float) -> None:
        """A probe that was sent to ``server`` at ``begin`` has had its answer by now, or is given up."""
        now = self.clock()
        if now - begin >= PROBED_S:
            self.windows.append(Window("still", server, begin, now))

    def hits(self, marker: int) -> list[Hit]:
        """All that happened to one request."""
        return self._hits.get(marker, [])

    @contextmanager
    def window(self, kind: str, server: str = "") -> Iterator[Window]:
        """A fault lasts as long as the block."""
        window = Window(kind, server, self.clock())
        self.windows.append(window)
        try:
            yield window
        finally:
            window.end = self.clock()

    def active(self, begin: float, end: float, after_s: float = 0.0) -> list[Window]:
        """Faults that touch [begin, end]."""
        return [w for w in self.windows if w.touches(begin, end, after_s)]

    def struck(self, marker: int, begin: float, end: float, servers: Collection[str]) -> str | None:
        """The fault that may have ended a stream of ``servers``, in words; None: there was none."""
        hits = [h for h in self.hits(marker) if h.server in servers]
        for h in hits:
            if h.what in DEADLY and h.at <= end:
                return f"{h.what} of {h.server}"
        for h in hits:
            for w in self.windows:
                if w.server == h.server and w.kind in DEADLY and w.touches(max(begin, h.at), end):
                    return f"{w.kind} of {w.server}"
        return None

    def hung_at(self, marker: int) -> float | None:
        """When its stream was made to hang (monotonic seconds); None: it was not."""
        return next((h.at for h in self.hits(marker) if h.what == HANG), None)

    def victims(self, marker: int, begin: float, end: float) -> set[str]:
        """Servers whose faults met this request: by trace, or since they refuse and the router cannot know it yet."""
        traced = {h.server for h in self.hits(marker) if h.what in DEADLY or h.what == "storm"}
        for h in self.hits(marker):
            traced |= {w.server for w in self.windows if w.server == h.server and w.touches(h.at, end)}
        fresh = (w for w in self.windows if w.kind in REFUSING and begin - 1.0 <= w.begin <= end)
        return traced | {w.server for w in fresh}
