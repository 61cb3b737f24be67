"""Which long prompts share the next batch: least remaining work first, as long as sharing pays. Beyond the paper."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from laps_core.policy.plan import Waiting

Beside = Callable[[Waiting], float]
"""A prompt -> predicted time of what is left, beside others in a batch: without the fixed time of a step (seconds)."""

AHEAD = 2.0
"""Each request that waits stands for this many that a saved step serves sooner: those behind it are still to come."""


def pack(items: Sequence[Waiting], beside_s: Beside, *, budget: int, fixed_s: float, waiting: int) -> list[int]:
    """Indices of the first of `items`, and of those behind it that it pays to take along, in order.

    A prompt taken along saves the step it would have had (`fixed_s`, for it and all who wait behind it) and delays
    those already in the batch by its own time. It goes along while the sum of latencies falls. An idle server runs
    small batches, each first token as early as can be; a loaded one fills them. Only a prompt of its own is cut: the
    piece of another would delay a batch and be a first token to nobody.

    items: in the order to serve them. budget: new tokens a batch may hold. waiting: requests of both classes that wait.
    A batch holds one prompt in progress at most, as SGLang has one slot for it.
    """
    picked: list[int] = []
    room, slot_taken = budget, False
    for i, item in enumerate(items):
        if room <= 0:
            break
        if item.started and slot_taken:
            continue
        taken = min(item.tokens, room)
        if picked:
            delay = len(picked) * beside_s(item)
            if taken < item.tokens or delay > fixed_s * AHEAD * (waiting - len(picked)):
                break
        picked.append(i)
        room -= taken
        slot_taken |= item.started
    return picked


def overtake(
    items: Sequence[Waiting],
    beside_s: Beside,
    *,
    budget: int,
    left_s: float,
    running: int,
    fixed_s: float,
    waiting: int,
) -> list[int]:
    """Indices of prompts so small that preempting the running batch for them pays.

    items: prompts not in progress, smallest first; those picked run whole. left_s: what the running batch still needs.
    running: requests in it. Those picked gain `left_s` each; the running ones lose the new batch's time, all others a
    step's fixed time.
    """
    best, gain = 0, 0.0
    tokens, seconds = 0, fixed_s
    for n, item in enumerate(items, 1):
        tokens += item.tokens
        seconds += beside_s(item)
        if item.started or tokens > budget or seconds > left_s:
            break
        now = n * left_s - running * seconds - fixed_s * AHEAD * max(0, waiting - n)
        if now > gain:
            best, gain = n, now
    return list(range(best))
