"""Requests of several tasks, each with an objective of its own for the first token (FlowPrefill)."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from laps_plan.traffic.job import Job
from laps_plan.traffic.streams import poisson

SPREAD = 0.8
"""Standard deviation of the logarithm of lengths, around the mean length of a task."""
LONGEST = 32768
"""Maximum length of a prompt (tokens)."""


@dataclass(frozen=True)
class Task:
    """One kind of requests."""

    name: str
    tokens: int
    """Mean length of a prompt."""
    share: float
    """Share of all requests (0..1)."""


TASKS = (Task("text", 590, 0.68), Task("image", 532, 0.08), Task("search", 5976, 0.20), Task("file", 6833, 0.04))
OBJECTIVES_S = {
    "8b": (0.25, 0.5, 4.0, 6.0),
    "14b": (0.4, 0.8, 6.5, 9.0),
    "32b": (0.5, 1.0, 7.5, 9.0),
    "70b": (1.0, 2.0, 15.0, 18.0),
}
"""Objective for the time to first token of each task, by model size (seconds); for 32B half of that for 70B."""


def jobs(rate: float, count: int, model: str, seed: int) -> list[Job]:
    """Return about ``count`` requests at ``rate`` per second, with their objectives as deadlines."""
    rng = random.Random(seed)
    found = []
    for at in poisson(rate, count / rate, rng):
        (i,) = rng.choices(range(len(TASKS)), [task.share for task in TASKS])
        drawn = rng.lognormvariate(math.log(TASKS[i].tokens) - SPREAD**2 / 2, SPREAD)
        new = min(LONGEST, max(1, round(drawn)))
        found.append(Job(at, new, slo_s=OBJECTIVES_S[model][i]))
    return found
