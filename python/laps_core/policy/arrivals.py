"""How many short requests are about to arrive, told from the two ways in which they come together.

*Returning*: clients in a closed loop send the next request when the last one completes, so a completed batch comes back
within a few milliseconds. Learned: which share of a batch, and how soon.

*Following*: a request that finds the server empty may be the first of a burst. Learned: how many came after such a
first one while it was still there, and how soon.

One sequential user never sends while its own request is present: it has no followers however fast it goes, and nothing
of its single request is due back any more when the next one is there.

A plain rate of arrivals cannot tell these apart: the fastest single user has the highest rate.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

_REMEMBERED = 16
_REMEMBERED_S = 5.0
"""Time after which a burst is forgotten (seconds)."""
_MARGIN = 0.05
_SHARP_S = 1e-3
_AT_LEAST = 1.5
_GAIN = 0.25


class Expected(NamedTuple):
    """Requests that should arrive soon."""

    requests: float
    by_s: float
    """When they should all be there (the clock of ``arrived``, seconds); infinite when that has yet to be found out."""


@dataclass(slots=True)
class _Group:
    """Requests that came after one event: a completed batch, or a first request."""

    at_s: float
    size: int
    """Requests in the batch; 0 for a first request."""
    came: int = 0
    last_s: float = 0.0
    """When the last one came, after the event."""
    vague: bool = False
    """Some came at an unknown time."""

    def add(self, now: float, n: int, blind_since: float) -> None:
        self.came += n
        earliest_s, latest_s = blind_since - self.at_s, now - self.at_s
        if latest_s - earliest_s <= _SHARP_S:
            self.last_s = max(self.last_s, latest_s)
        elif earliest_s > _SHARP_S:
            # Not there when last looked for: how late is unknown, but it was no small spread.
            self.last_s = max(self.last_s, _AT_LEAST * earliest_s)
        else:
            self.vague = True

    def joined(self, now: float, n: int) -> None:
        """Another batch of ``n`` completed at ``now``: lateness counts from there."""
        self.last_s = max(0.0, self.last_s - (now - self.at_s))
        self.at_s, self.size = now, self.size + n


class Arrivals:
    """Feeds on three events: ``arrived``, ``dispatched``, ``completed``, all with times of one clock (seconds).

    A request that came during a batch tells another story than one that came after it. Give its true time where
    there is one (it may lie in the past), else the time of the poll that found it and since when nobody had looked.

    Of two events at the same time the one reported first came first: clocks may be coarse, and a client that comes back
    at the very moment its batch is done has come back.
    """

    def __init__(self, return_horizon_s: float, follow_horizon_s: float) -> None:
        """A return later than ``return_horizon_s`` after the batch, or a follower later than ``follow_horizon_s``
        after the first, is another arrival like any."""
        self._return_horizon_s = return_horizon_s
        self._follow_horizon_s = follow_horizon_s
        self._waiting = 0
        self._in_service = 0
        self._started_s = math.inf
        self._batches: deque[_Group] = deque()
        self.share = 0.0
        """Smoothed share of a completed batch whose clients come back within the horizon (0..1)."""
        self._returned: deque[_Group] = deque(maxlen=_REMEMBERED)
        self._first: _Group | None = None
        self._bursts: deque[_Group] = deque(maxlen=_REMEMBERED)

    @property
    def completed_s(self) -> float:
        """When the last batch completed; minus infinity before the first."""
        return self._batches[-1].at_s if self._batches else -math.inf

    def arrived(self, now: float, n: int = 1, blind_since: float | None = None) -> None:
        """``n`` short requests arrived at ``now``, or between ``blind_since`` and ``now``."""
        if n <= 0:
            return
        earliest = now if blind_since is None else blind_since
        during_service = earliest < self.completed_s
        if self._waiting + self._in_service == 0 and not during_service:
            if self._first:
                self._bursts.append(self._first)
            self._first = _Group(now, 0, n - 1)
        elif self._first and 0.0 <= earliest - self._first.at_s <= self._follow_horizon_s:
            self._first.add(now, n, earliest)
        self._waiting += n
        batch = next((b for b in reversed(self._batches) if b.at_s <= earliest), None)
        if batch and batch.came < batch.size and earliest - batch.at_s <= self._return_horizon_s:
            batch.add(now, n, earliest)

    def waiting(self, n: int) -> None:
        """``n`` is how many wait in truth; aborted requests leave no event of their own."""
        self._waiting = n

    def dispatched(self, now: float, n: int) -> None:
        """``n`` waiting requests went into service."""
        self._started_s = now
        self._waiting = max(0, self._waiting - n)
        self._in_service += n

    def completed(self, now: float, n: int) -> None:
        """``n`` requests in service are done; call it before their clients can know."""
        self._in_service = max(0, self._in_service - n)
        if self._batches and self._started_s < self._batches[-1].at_s:
            # It ran behind the one before it and nothing followed it: the clients of both are due back together.
            self._batches[-1].joined(now, n)
            return
        # Those who came during this batch may be reported only now: the one before it is not judged yet.
        while len(self._batches) > 1:
            batch = self._batches.popleft()
            self.share += _GAIN * (min(1.0, batch.came / batch.size) - self.share)
            if batch.came:
                self._returned.append(batch)
        self._batches.append(_Group(now, max(1, n)))

    def returning(self, now: float) -> Expected:
        """Return the requests that are still due back from the last completed batch."""
        if not self._batches:
            return Expected(0.0, now)
        batch = self._batches[-1]
        return _left(now, batch.at_s + _usual(self._returned, now), self.share * batch.size - batch.came)

    def following(self, now: float) -> Expected:
        """Return the requests expected after a first one that waits on an otherwise empty server."""
        first = self._first
        if first is None or self._in_service or self.completed_s > first.at_s:
            return Expected(0.0, now)
        alike = [b for b in self._bursts if b.at_s >= now - _REMEMBERED_S and b.came >= first.came]
        if not alike:
            return Expected(0.0, now)
        more = sum(b.came - first.came for b in alike) / len(alike)
        return _left(now, first.at_s + _usual(alike, now), more)


def _usual(groups: Iterable[_Group], now: float) -> float:
    """How long after their event groups like these are complete; infinite when no recent one tells (seconds).

    Later than three in four of them, by as much as those are spread.
    """
    ordered = sorted(g.last_s for g in groups if g.came and not g.vague and g.at_s >= now - _REMEMBERED_S)
    if not ordered:
        return math.inf
    middle, upper = ordered[len(ordered) // 2], ordered[3 * len(ordered) // 4]
    return upper + max(upper - middle, _MARGIN * upper)


def _left(now: float, by_s: float, requests: float) -> Expected:
    return Expected(max(0.0, requests), by_s) if now < by_s else Expected(0.0, now)
