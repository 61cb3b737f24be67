"""Choice between a batch of their own and a shared step for short requests, by the sum of slowdowns. Beyond the paper.

A batch of their own costs a step's fixed time F, which everybody who waits has to wait longer. Where few wait, or where
long prompts are so long that F is nothing to them, short requests are served at once. Where many wait and most steps
are fixed time (a mixture of experts), batches that share a step serve all of them sooner.

A wait is weighed by one over the time that its request takes alone, so the sum is one of slowdowns.
"""

from __future__ import annotations

from laps_core.policy.packing import AHEAD
from laps_core.policy.plan import Paused


def preempting_pays(shorts: float, paused: Paused, *, took_s: float, others: float, fixed_s: float) -> bool:
    """Return True if a short batch, which takes `took_s`, runs in the middle of a long one.

    shorts, others: weights (1/seconds) of the short requests, which would wait for the long batch, and of all others
    that wait. fixed_s: F.
    """
    return shorts * paused.left_s >= paused.weight * took_s + others * fixed_s * AHEAD


def sharing_pays(shorts: float, *, later_s: float, others: float, fixed_s: float) -> bool:
    """Return True if short requests run in the step of a long batch that is about to start, and have their first token
    `later_s` later. shorts, others: weights (1/seconds), as above."""
    return shorts * later_s <= others * fixed_s * AHEAD
