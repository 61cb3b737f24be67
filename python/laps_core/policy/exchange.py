"""The one objective: the least sum of slowdowns. Beyond the paper.

A slowdown is the time to the first token over the time that the request takes alone. So a second of delay costs as much
as the *weight* of those who are delayed: the sum, over them, of one over the time that each takes alone.

Each decision is an exchange: some have their first token sooner, others later, and a step is saved or added, whose
fixed time all others who wait are spared, or wait, too. It is made where the sum of slowdowns falls:

- a batch runs in a pause (``preemption.pays``): it goes before what is paused, and a step is added
- short requests run in the step of long ones (``preemption.share``): they wait for its work, and a step is saved, to
  who comes behind them, too
- a prompt joins a long batch (``batching.pack``): those in it wait for its work, and a step is saved. Prompts of one
  batch count alike: weighed, those that grow long join less, and wait up to a quarter longer
"""

from __future__ import annotations

AHEAD = 2.0
"""Each request that waits stands for this many: those behind it are still to come."""


def gain(fixed_s: float, others: float, *moves: tuple[float, float]) -> float:
    """By how much an exchange lowers the sum of slowdowns.

    `fixed_s`: fixed time of the step that is saved (seconds), negative if one is added. `others`: weight of those who
    wait and do not move (1/seconds). `moves`: (weight, seconds sooner) of those who do.
    """
    return AHEAD * fixed_s * others + sum(weight * sooner_s for weight, sooner_s in moves)
