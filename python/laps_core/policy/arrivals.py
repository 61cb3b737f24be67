"""Groups of short requests that arrive together: how many more requests of a group are expected, and how soon.

A group consists of the requests in the window after an event: after a *batch*, the next requests of its clients
(closed loop); after the *first request* on an empty server, its burst. Groups of the same kind predict later groups.

The server never waits for a single sequential user, however fast: when that user is back, the group is complete. A
plain arrival rate cannot show this, because the fastest single user has the highest rate.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

_REMEMBERED = 24
"""Number of earlier groups of each kind that are remembered for predictions."""
_COUNTED = 32
"""Number of latest arrivals from which their rate is estimated."""


class Rate:
    """Rate of the latest arrivals. Times are seconds of one clock."""

    def __init__(self) -> None:
        self._at_s: deque[float] = deque(maxlen=_COUNTED + 1)

    def record(self, now: float, n: int) -> None:
        """Record that `n` requests arrived at `now`. The first call starts the count."""
        self._at_s.extend([now] * (n if self._at_s else n + 1))

    def per_s(self, now: float) -> float:
        """Return the arrivals per second, up to `now`; infinite until a time has passed in which to count."""
        counted_s = now - self._at_s[0] if self._at_s else 0.0
        return (len(self._at_s) - 1) / counted_s if counted_s > 0.0 else math.inf


@dataclass(slots=True)
class _Group:
    """Requests that arrived after one event."""

    at_s: float
    size: int
    """Most requests that can arrive."""
    arrived: int = 0
    last_s: float = 0.0
    """Shortest possible time from the event to the last arrival (seconds)."""
    seen_s: float = 0.0
    """Time from the event until the last arrival was seen (seconds)."""


class Groups:
    """The groups of one kind. Times are seconds of one clock.

    Events with the same time happened in the order in which they were reported, because clocks can be coarse: a client
    that comes back at the very moment when its batch ends belongs to the group of that batch.
    """

    def __init__(self, horizon_s: float) -> None:
        """``horizon_s``: a group ends this time after its event."""
        self._horizon_s = horizon_s
        self._groups: deque[_Group] = deque(maxlen=_REMEMBERED + 1)

    @property
    def at_s(self) -> float:
        """Time of the last event; minus infinity before the first event."""
        return self._groups[-1].at_s if self._groups else -math.inf

    def begin(self, now: float, size: int) -> None:
        """Start a group: up to ``size`` requests can arrive after the event at ``now``."""
        self._groups.append(_Group(now, size))

    def add(self, n: int, earliest_s: float, now: float) -> None:
        """Count ``n`` requests that arrived between ``earliest_s``, the last look for arrivals, and ``now``."""
        group = next((g for g in reversed(self._groups) if g.at_s <= earliest_s), None)
        if group and group.arrived < group.size and earliest_s - group.at_s <= self._horizon_s:
            group.arrived = min(group.size, group.arrived + n)
            group.last_s = max(group.last_s, earliest_s - group.at_s)
            group.seen_s = max(group.seen_s, now - group.at_s)

    def chance(self, now: float, until: float, room: int) -> float:
        """Return the probability (0..1) that the rest of the last group arrives before ``until``.

        Only earlier groups of which at least the same share arrived are compared: the result is the share of them that
        went on and were complete by then. Groups whose last arrival can lie on either side of that time do not count;
        if no group is left the result is 1, to try a hold. It is 0 if no group can be compared, after the horizon, or
        if the ``room`` (requests) is too small for all requests that can still arrive.
        """
        if now - self.at_s > self._horizon_s:
            return 0.0
        *earlier, group = self._groups
        return self._chance(earlier, group, until - group.at_s, room)

    def chance_of_next(self, size: int, within_s: float, room: int) -> float:
        """Return the probability (0..1) that the next group (``size`` requests) arrives within ``within_s``."""
        return self._chance(list(self._groups)[:-1], _Group(0.0, size), within_s, room)

    @staticmethod
    def _chance(earlier: Sequence[_Group], group: _Group, by_s: float, room: int) -> float:
        share = group.arrived / group.size
        alike = [g for g in earlier if g.arrived >= share * g.size]
        if not alike or group.size - group.arrived > room:
            return 0.0
        on = [g for g in alike if round(g.arrived * group.size / g.size) > group.arrived]
        complete = sum(g.seen_s < by_s for g in on)
        counted = len(alike) - len(on) + sum(g.last_s >= by_s for g in on) + complete
        return complete / counted if counted else 1.0
