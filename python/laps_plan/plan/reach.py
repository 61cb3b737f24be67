"""Limits of a setup: the highest load at which enough requests are in time, and the number of servers needed."""

from __future__ import annotations

import math
from dataclasses import dataclass

from laps_plan.plan.setup import IN_TIME, Setup
from laps_plan.plan.trials import Trials

LOADS = (0.4, 0.6, 0.75, 0.9, 1.0)
"""Loads that are always simulated for the curve, as shares of what the servers can do."""
HALVINGS = 4
"""Bisection steps between two of LOADS."""
STEPS = 4
"""Maximum numbers of servers that are tried after the first."""
RUNS = len(LOADS) + HALVINGS
"""Maximum simulations for the highest load of one setup."""


@dataclass(frozen=True)
class Reach:
    """Highest load of one setup."""

    curve: list[tuple[float, float]]
    """(load, share in time), by load."""
    load: float
    """The highest load found at which IN_TIME of each class are in time; 0 = none."""
    is_lower_bound: bool
    """True if ``load`` is the highest load that was tried, so that the setup might reach more."""


def find_highest_load(trials: Trials, setup: Setup, servers: int) -> Reach:
    """Return the highest load, found by bisection between LOADS on stretches of the traffic with scaled times."""
    curve: dict[float, float] = {0.0: 1.0}
    for load in LOADS:
        curve[load] = trials.in_time(setup, load, servers)
    bad = min((load for load, share in curve.items() if share < IN_TIME), default=None)
    good = max(load for load in curve if bad is None or load < bad)
    if bad is not None:
        for _ in range(HALVINGS):
            middle = (good + bad) / 2
            curve[middle] = trials.in_time(setup, middle, servers)
            if curve[middle] >= IN_TIME:
                good = middle
            else:
                bad = middle
    del curve[0.0]
    return Reach(sorted(curve.items()), good, bad is None)


def servers_needed(trials: Trials, setup: Setup, load_each: float) -> int | None:
    """Return the fewest servers with which IN_TIME of each class are in time; None = not found.

    ``load_each``: highest load found for the setup, from which the first number of servers is estimated.
    """
    if load_each <= 0.0:
        return None
    work = trials.traffic.rate / trials.capacity
    # With fewer servers the queue would grow for as long as the traffic lasts.
    least = max(2 if setup.pools else 1, math.ceil(work))
    n = max(least, math.ceil(work / load_each))
    best: int | None = None
    for _ in range(1 + STEPS):
        if trials.in_time(setup, work / n, n) >= IN_TIME:
            best = n
            if n == least:
                break
            n -= 1
        elif best is not None:
            break
        else:
            n += 1
    return best
