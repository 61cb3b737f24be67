"""Short requests that come together: how many more of a group are to be expected, and how soon.

A group is what comes within the window after an event. After a *batch* its clients come back, in a closed loop; after
the *first request* on an empty server comes the rest of its burst. Groups of the same kind tell what is to come.

One sequential user is never waited for, however fast: all of its batch is back when it is back, and nobody follows it.
A plain rate of arrivals cannot tell: the fastest single user has the highest rate.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

_REMEMBERED = 24
"""So many groups of a kind tell what is to come."""


@dataclass(slots=True)
class _Group:
    """Requests that came after one event."""

    at_s: float
    size: int
    """How many may come."""
    came: int = 0
    last_s: float = 0.0
    """How long after the event the last one came, at least."""
    seen_s: float = 0.0
    """How long after the event the last one was seen."""


class Groups:
    """The groups of one kind. Times are seconds of one clock.

    Of two events at the same time the one reported first came first: clocks may be coarse, and a client that comes back
    at the very moment its batch is done has come back.
    """

    def __init__(self, horizon_s: float) -> None:
        """A request later than ``horizon_s`` after the event does not belong to its group."""
        self._horizon_s = horizon_s
        self._groups: deque[_Group] = deque(maxlen=_REMEMBERED + 1)

    @property
    def at_s(self) -> float:
        """When the last event was; minus infinity before the first."""
        return self._groups[-1].at_s if self._groups else -math.inf

    def begin(self, now: float, size: int) -> None:
        """An event: up to ``size`` requests may come after it."""
        self._groups.append(_Group(now, size))

    def add(self, n: int, earliest_s: float, now: float) -> None:
        """``n`` requests came between ``earliest_s``, when last looked for, and ``now``."""
        group = next((g for g in reversed(self._groups) if g.at_s <= earliest_s), None)
        if group and group.came < group.size and earliest_s - group.at_s <= self._horizon_s:
            group.came = min(group.size, group.came + n)
            group.last_s = max(group.last_s, earliest_s - group.at_s)
            group.seen_s = max(group.seen_s, now - group.at_s)

    def chance(self, now: float, until: float, room: int) -> float:
        """Return how likely the rest of the last group is there by ``until`` (0..1); 0 if nobody is to be expected.

        That is the share of earlier groups, among those of which as many had come, that went on and were complete by
        then. Those that were seen only later, but may have been, tell nothing; if none tells anything it is tried.
        0 if not all that may come find ``room``.
        """
        if now - self.at_s > self._horizon_s:
            return 0.0
        *earlier, group = self._groups
        return self._chance(earlier, group, until - group.at_s, room)

    def chance_of_next(self, size: int, within_s: float, room: int) -> float:
        """Return how likely a group that is to come, of this size, is there so soon after its event (0..1)."""
        return self._chance(list(self._groups)[:-1], _Group(0.0, size), within_s, room)

    @staticmethod
    def _chance(earlier: Sequence[_Group], group: _Group, by_s: float, room: int) -> float:
        share = group.came / group.size
        alike = [g for g in earlier if g.came >= share * g.size]
        if not alike or group.size - group.came > room:
            return 0.0
        on = [g for g in alike if round(g.came * group.size / g.size) > group.came]
        complete = sum(g.seen_s < by_s for g in on)
        told = len(alike) - len(on) + sum(g.last_s >= by_s for g in on) + complete
        return complete / told if told else 1.0
