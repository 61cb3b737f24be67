"""Order inside a length class: who is served first. Smaller keys first; equal keys keep their order of arrival.

A new one goes into ``ORDERS`` and into the knob: the type of ``LapsConfig.order`` has the same names. Only least-work
has the guard; under all others, and for short requests, ``Patience`` bounds how often somebody is passed over.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

from laps_core.policy.plan import Waiting


class Work(Protocol):
    """Predicts the work of requests (seconds); ``sizes.Sizes`` does so by the latency model."""

    def work_s(self, w: Waiting) -> float:
        """Return the time of what is left."""
        ...

    def lone_s(self, w: Waiting) -> float:
        """Return the time of all of it, alone on the server."""
        ...


Key = tuple[float, ...]
Order = Callable[[Waiting, Work, float], Key]
"""(request, what tells its work, now in seconds) -> sort key. Its last element is the time of arrival, or 0 where
that counts before: ``urgency`` leaves it out when it compares a prompt with a paused batch."""

_IN_TIME, _NO_DEADLINE, _LATE = 0.0, 1.0, 2.0


def slack_s(w: Waiting, sizes: Work, now: float) -> float:
    """Deadline - now - remaining work (seconds); infinite without a deadline."""
    return math.inf if w.deadline_s is None else w.deadline_s - now - sizes.work_s(w)


def least_work(w: Waiting, sizes: Work, now: float) -> Key:
    """Least remaining work first, with a guard for the prompt that has waited longest; see ``guard``, ``packing``.

    Those that are too late go behind all others: a lost deadline must not cost another one.
    """
    work_s = sizes.work_s(w)
    return float(w.deadline_s is not None and w.deadline_s - now < work_s), work_s, w.since_s


def fcfs(w: Waiting, sizes: Work, now: float) -> Key:
    """First come, first served."""
    return (w.since_s,)


def edf(w: Waiting, sizes: Work, now: float) -> Key:
    """Earliest deadline first among those that can still make it.

    Then those without a deadline, then those too late, each by arrival: a lost deadline must not cost another one.
    """
    if w.deadline_s is None:
        return _NO_DEADLINE, w.since_s, 0.0
    if slack_s(w, sizes, now) < 0.0:
        return _LATE, w.since_s, 0.0
    return _IN_TIME, w.deadline_s, w.since_s


def lars(w: Waiting, sizes: Work, now: float) -> Key:
    """Smallest slack relative to total work first (Medha).

    A late request keeps its place at the front and goes on gaining, so nothing starves; ``edf`` puts it behind.
    Without a deadline: after all others, by arrival.
    """
    return slack_s(w, sizes, now) / max(sizes.lone_s(w), 1e-9), w.since_s


def s_edf(w: Waiting, sizes: Work, now: float) -> Key:
    """Largest sgn(slack) / deadline first (FlowPrefill).

    In time: earliest deadline first. Too late: after those, latest deadline first (it is the least late). No slack
    at all, or no deadline (the limit of the formula): in between, by arrival.
    """
    slack = slack_s(w, sizes, now)
    if w.deadline_s is None or slack == 0.0:
        return _NO_DEADLINE, w.since_s, 0.0
    if slack < 0.0:
        return _LATE, -w.deadline_s, w.since_s
    return _IN_TIME, w.deadline_s, w.since_s


LEAST_WORK = "least-work"
ORDERS: dict[str, Order] = {LEAST_WORK: least_work, "fcfs": fcfs, "edf": edf, "lars": lars, "s-edf": s_edf}


def line(order: Order, waiting: Sequence[Waiting], sizes: Work, now: float) -> list[int]:
    """Indices of ``waiting`` in the order to serve them at ``now`` (seconds): by priority, then as ``order`` says."""
    return sorted(range(len(waiting)), key=lambda i: (waiting[i].rank, *order(waiting[i], sizes, now)))


OLDEST_EVERY = 8
"""Every so many turns in which older requests are passed over, one goes by arrival: requests that an order would leave
behind for good cost the others at most an eighth of the device."""


def passes_over(waiting: Sequence[Waiting], picked: Sequence[int]) -> bool:
    """Return True if a request older than one of the `picked` is not among them."""
    if not picked or len(picked) == len(waiting):
        return False
    youngest_s, taken = max(waiting[i].since_s for i in picked), set(picked)
    return any(w.since_s < youngest_s and i not in taken for i, w in enumerate(waiting))


class Patience:
    """Bounds how often a request is passed over, under any order and any load.

    An order that puts somebody last (who is too late for his deadline, or has none) serves him never while others keep
    coming. Here, whoever is the oldest of those that wait is served within OLDEST_EVERY turns, and so a request with
    n older ones before it within (n + 1) OLDEST_EVERY turns.
    """

    def __init__(self) -> None:
        self._passed = 0

    @property
    def due(self) -> bool:
        """Return True if the next turn goes by arrival."""
        return self._passed >= OLDEST_EVERY - 1

    def served(self, passed_over: bool) -> None:
        """A turn was taken; `passed_over`: by somebody younger than one who still waits."""
        self._passed = self._passed + 1 if passed_over and not self.due else 0
