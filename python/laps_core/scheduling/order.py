"""Order inside a length class: who is served first. Smaller keys first; equal keys keep their order of arrival."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from laps_core.config import ConfigError


class Job(NamedTuple):
    """What an order may look at. Times are seconds of one clock, work is predicted seconds."""

    arrival_s: float
    deadline_s: float | None
    remaining_s: float
    """Work left."""
    total_s: float
    """Work of the whole request."""


Key = tuple[float, ...]
Order = Callable[[Job, float], Key]
"""(job, now in seconds) -> sort key."""

_IN_TIME, _NO_DEADLINE, _LATE = 0.0, 1.0, 2.0


def slack_s(job: Job, now: float) -> float:
    """Deadline - now - remaining work (seconds); infinite without a deadline."""
    return math.inf if job.deadline_s is None else job.deadline_s - now - job.remaining_s


def fcfs(job: Job, now: float) -> Key:
    """First come, first served."""
    return (job.arrival_s,)


def edf(job: Job, now: float) -> Key:
    """Earliest deadline first among those that can still make it.

    Then those without a deadline, then those too late, each by arrival: a lost deadline must not cost another one.
    """
    if job.deadline_s is None:
        return _NO_DEADLINE, job.arrival_s, 0.0
    if slack_s(job, now) < 0.0:
        return _LATE, job.arrival_s, 0.0
    return _IN_TIME, job.deadline_s, job.arrival_s


def lars(job: Job, now: float) -> Key:
    """Smallest slack relative to total work first [M].

    A late request keeps its place at the front and goes on gaining, so nothing starves; ``edf`` puts it behind.
    Without a deadline: after all others, by arrival.
    """
    return slack_s(job, now) / max(job.total_s, 1e-9), job.arrival_s


def s_edf(job: Job, now: float) -> Key:
    """Largest sgn(slack) / deadline first [F].

    In time: earliest deadline first. Too late: after those, latest deadline first (it is the least late). No slack
    at all, or no deadline (the limit of the formula): in between, by arrival.
    """
    slack = slack_s(job, now)
    if job.deadline_s is None or slack == 0.0:
        return _NO_DEADLINE, job.arrival_s, 0.0
    if slack < 0.0:
        return _LATE, -job.deadline_s, job.arrival_s
    return _IN_TIME, job.deadline_s, job.arrival_s


LEAST_WORK = "least-work"
"""Least remaining work first, with a guard for the prompt that has waited longest; see ``guard`` and ``packing``."""
ORDERS: dict[str, Order] = {"fcfs": fcfs, "edf": edf, "lars": lars, "s-edf": s_edf}


def order_named(name: str) -> Order:
    """Look up an order. Raises ConfigError that lists the valid names."""
    try:
        return ORDERS[name]
    except KeyError:
        raise ConfigError(f"unknown order {name!r}; known: {', '.join(ORDERS)}") from None


def sorted_by(order: Order, jobs: Sequence[Job], now: float) -> list[int]:
    """Indices of ``jobs`` in the order they should be served at ``now`` (seconds)."""
    return sorted(range(len(jobs)), key=lambda i: order(jobs[i], now))


OLDEST_EVERY = 8
"""Of so many turns in which older requests are passed over, one goes by arrival. An eighth of the device is what
requests that any order would leave behind for good may cost those that it would serve."""


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
        """Whether the next turn goes by arrival."""
        return self._passed >= OLDEST_EVERY - 1

    def served(self, passed_over: bool) -> None:
        """A turn was taken; `passed_over`: by somebody younger than one who still waits."""
        self._passed = self._passed + 1 if passed_over and not self.due else 0
