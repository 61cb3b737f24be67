"""Order inside a length class: who is served first. Smaller keys first; equal keys keep their order of arrival.

A new one goes into ``ORDERS`` and into the knob: the type of ``LapsConfig.order`` has the same names. Only least-work
has the guard; under all others, and for short requests, ``Patience`` bounds how often somebody is passed over.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from laps_core.policy.predict import Sizes
from laps_core.policy.types import Waiting

Key = tuple[float, ...]
Lone = Callable[[Waiting], float]
"""Predicts the time of all of a request, alone on the server (seconds)."""
Order = Callable[[Waiting, float, Lone, float], Key]
"""(request, predicted time of what is left, predicts the time of all of it, now; seconds) -> sort key. Its last element
is the time of arrival, or 0 where that counts before: ``preemption`` leaves it out when it compares a prompt with a
paused batch."""

_IN_TIME, _NO_DEADLINE, _LATE = 0.0, 1.0, 2.0


def slack_s(w: Waiting, work_s: float, now: float) -> float:
    """Deadline - now - remaining work (seconds); infinite without a deadline."""
    return math.inf if w.deadline_s is None else w.deadline_s - now - work_s


def least_work(w: Waiting, work_s: float, lone_s: Lone, now: float) -> Key:
    """Least remaining work first, with a guard for the prompt that has waited longest; deadlines do not count."""
    return work_s, w.since_s


def fcfs(w: Waiting, work_s: float, lone_s: Lone, now: float) -> Key:
    """First come, first served."""
    return (w.since_s,)


def edf(w: Waiting, work_s: float, lone_s: Lone, now: float) -> Key:
    """Earliest deadline first among those that can still make it.

    Then those without a deadline, then those too late, each by arrival: a lost deadline must not cost another one.
    """
    if w.deadline_s is None:
        return _NO_DEADLINE, w.since_s, 0.0
    if slack_s(w, work_s, now) < 0.0:
        return _LATE, w.since_s, 0.0
    return _IN_TIME, w.deadline_s, w.since_s


def lars(w: Waiting, work_s: float, lone_s: Lone, now: float) -> Key:
    """Smallest slack relative to total work first (Medha).

    A late request keeps its place at the front and goes on gaining, so nothing starves; ``edf`` puts it behind.
    Without a deadline: after all others, by arrival.
    """
    return slack_s(w, work_s, now) / max(lone_s(w), 1e-9), w.since_s


def s_edf(w: Waiting, work_s: float, lone_s: Lone, now: float) -> Key:
    """Largest sgn(slack) / deadline first (FlowPrefill).

    In time: earliest deadline first. Too late: after those, latest deadline first (it is the least late). No slack
    at all, or no deadline (the limit of the formula): in between, by arrival.
    """
    slack = slack_s(w, work_s, now)
    if w.deadline_s is None or slack == 0.0:
        return _NO_DEADLINE, w.since_s, 0.0
    if slack < 0.0:
        return _LATE, -w.deadline_s, w.since_s
    return _IN_TIME, w.deadline_s, w.since_s


LEAST_WORK = "least-work"
ORDERS: dict[str, Order] = {LEAST_WORK: least_work, "fcfs": fcfs, "edf": edf, "lars": lars, "s-edf": s_edf}


def line(order: Order, waiting: Sequence[Waiting], sizes: Sizes, now: float) -> list[int]:
    """Indices of ``waiting`` in the order to serve them at ``now`` (seconds): by priority, then as ``order`` says."""

    def key(i: int) -> Key:
        w = waiting[i]
        return w.priority, *order(w, sizes.work_s(w), sizes.lone_s, now)

    return sorted(range(len(waiting)), key=key)
