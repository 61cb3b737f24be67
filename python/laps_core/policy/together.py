"""One step for short requests, long prompts and a row of each stream, where all have deadlines. Beyond the paper.

Where deadlines are near nobody preempts who can wait: a step holds what ends in time for everybody in it, and its fixed
time is spent once (FlowPrefill, SLO-aware batching). While they are far, all is as without deadlines: short requests
need not wait for a full step.

Bound: a long prompt that is cut for it has at least half of the time, rows not counted. Where short requests leave it
less they are batches of their own, and the gap keeps these apart.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from laps_core.length import LONG
from laps_core.policy.batching import oldest_of
from laps_core.policy.predict import Sizes
from laps_core.policy.types import LongBatch, Plan, Waiting

CALM = 16.0
"""Deadlines are far while, one after the other, everybody who waits ends in this part of the time until its own."""


def together(
    now: float, plan: Plan, shorts: Sequence[Waiting], longs: Sequence[Waiting], sizes: Sizes, *, within_s: float,
    rows: int,
) -> Plan | None:  # fmt: skip
    """The plan as one step of its short requests and of its long prompts, the first of them cut where it has to be.

    None without long prompts, where a request that waits has no deadline, while all of these are far, or where the
    first prompt has less than half of the time. The step takes at most `within_s` (seconds), its `rows` not counted,
    and ends in time for each of its short requests that can be in time at all. `shorts`, `longs`: all that wait.
    """
    waiting = (*shorts, *longs)
    if not plan.long.picked or any(w.deadline_s is None for w in waiting) or _far(now, waiting, sizes):
        return None
    joining, turns = [shorts[i] for i in plan.picked], [longs[i] for i in plan.long.picked]
    alone_s = sizes.batch_s(joining)
    left_s = (w.deadline_s - now for w in joining if w.deadline_s is not None)
    within_s = min([within_s, *(s for s in left_s if s >= alone_s)])
    joined = sizes.joining(joining)
    room = (sizes.budget - joined - rows) // sizes.unit * sizes.unit
    shape = [(w.tokens, w.history) for w in joining]

    def takes_s(tokens: int, of: Waiting) -> float:
        return sizes.model.predict([*shape, (tokens, of.history)]) or 0.0

    def late(tokens: int, of: Waiting) -> bool:
        return takes_s(tokens, of) > within_s

    first, units = turns[0], range(1, min(turns[0].tokens, max(0, room)) // sizes.unit + 1)
    whole = first.tokens <= room and not late(first.tokens, first)
    tokens = first.tokens if whole else bisect_left(units, True, key=lambda n: late(n * sizes.unit, first)) * sizes.unit
    if not tokens or (not whole and takes_s(tokens, first) < 2.0 * alone_s):
        return None
    picked = 1
    shape.append((tokens, first.history))
    for w in turns[1:] if whole else ():
        if w.started or tokens + w.tokens > room or late(w.tokens, w):
            break
        shape.append((w.tokens, w.history))
        tokens, picked = tokens + w.tokens, picked + 1
    chosen = plan.long.picked[:picked]
    return plan._replace(
        order=(LONG,),
        long=LongBatch(chosen, min(sizes.budget, sizes.whole_units(tokens) + joined)),
        mixed=bool(joining),
        account=plan.account._replace(oldest=oldest_of(longs) in chosen),
    )


def _far(now: float, waiting: Sequence[Waiting], sizes: Sizes) -> bool:
    """Return True if all of their deadlines are far."""
    dues = sorted((w.deadline_s - now, sizes.work_s(w)) for w in waiting if w.deadline_s is not None)
    ends_s = accumulate(work_s for _, work_s in dues)
    return all(CALM * end_s <= left_s for end_s, (left_s, _) in zip(ends_s, dues, strict=True))
