"""The only objective of the scheduler: the least sum of slowdowns. Beyond the paper.

The slowdown of a request is its time to the first token divided by the time that it takes alone. So a second of delay
costs the *weight* of the delayed requests: the sum of 1 / (time alone) over these requests.

Each decision is an exchange. Some requests have their first token sooner, others later. A step is saved or added, so
all other waiting requests wait less or more by its fixed time. The exchange is made if the sum does not rise:

- a batch runs in a pause (``preemption.should_preempt``): the batch goes before the paused batch, and a step is added
- short requests run in the step of long prompts (``preemption.share``): the short requests wait for the long work, and
  a step is saved, also for the requests behind them
- a prompt joins a long batch (``batching.pack``): the batch waits for the work of that prompt, and a step is saved. All
  prompts of a batch count alike: with weights, longer prompts would join less often, and wait up to a quarter longer
"""

from __future__ import annotations

AHEAD = 2.0
"""Requests that each waiting request stands for, because more requests will arrive behind it."""


def gain(fixed_s: float, others: float, *moves: tuple[float, float]) -> float:
    """Return by how much an exchange lowers the sum of slowdowns.

    `fixed_s`: fixed time of the saved step (seconds), negative if a step is added. `others`: weight of the waiting
    requests that do not move (1/seconds). `moves`: (weight, seconds sooner) of the requests that move.
    """
    return AHEAD * fixed_s * others + sum(weight * sooner_s for weight, sooner_s in moves)
