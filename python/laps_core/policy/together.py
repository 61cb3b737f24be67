"""One step for short requests, long prompts and a row of each stream. Beyond the paper.

In slices, a long batch and the decode steps in its pauses each read the weights. A part of that batch that carries the
rows reads them once for both. But in its pauses no decode step can run, and a short batch only if the tokens of the
rows still come in time: most short requests wait for its end. It runs if that lowers the sum of slowdowns
(``exchange``): if long prompts wait, and few short requests arrive.

If all requests have deadlines, and deadlines are near, no request that can wait preempts: a step holds the work that
ends in time for all requests in the step, and its fixed time is spent once (FlowPrefill, SLO-aware batching). If
deadlines are far, the rules without deadlines apply, so that short requests need not wait for a full step.

Bound: a long prompt that is cut for the step has at least half of the step's time, rows not counted. If short requests
leave less, they run as batches of their own, and the gap keeps these batches apart.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from laps_core.length import LONG
from laps_core.policy.batching import oldest_of
from laps_core.policy.exchange import gain
from laps_core.policy.predict import Sizes
from laps_core.policy.types import LongBatch, Plan, Waiting

CALM = 16.0
"""Far deadlines: run one after the other, all waiting requests end within 1 / CALM of the time to their deadlines."""


def together(
    now: float, plan: Plan, shorts: Sequence[Waiting], longs: Sequence[Waiting], sizes: Sizes, *, within_s: float,
    rows: int,
) -> Plan | None:  # fmt: skip
    """Return the plan as one step, see ``joint_step``. None if a waiting request has no deadline, if all deadlines are
    far, or if there is no such step. `shorts`, `longs`: all waiting requests."""
    waiting = (*shorts, *longs)
    if any(w.deadline_s is None for w in waiting) or _far(now, waiting, sizes):
        return None
    return joint_step(now, plan, shorts, longs, sizes, within_s=within_s, rows=rows)


def joint_step(
    now: float, plan: Plan, shorts: Sequence[Waiting], longs: Sequence[Waiting], sizes: Sizes, *, within_s: float,
    rows: int,
) -> Plan | None:  # fmt: skip
    """Return the plan as one step of its short requests and its long prompts; the first long prompt is cut if needed.

    None without long prompts, or if the first prompt is cut to less than half of the time. The step takes at most
    `within_s` (seconds) without its `rows`, and ends in time for each of its short requests that can be in time.
    `shorts`, `longs`: the requests that the plan picks from.
    """
    if not plan.long.picked:
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
    picked, held = 1, sizes.whole_units(tokens)
    shape.append((tokens, first.history))
    for w in turns[1:] if whole else ():
        more = sizes.whole_units(w.tokens)
        if w.started or held + more > room or late(w.tokens, w):
            break
        shape.append((w.tokens, w.history))
        held, picked = held + more, picked + 1
    chosen = plan.long.picked[:picked]
    return plan._replace(
        order=(LONG,),
        long=LongBatch(chosen, min(sizes.budget, held + joined)),
        mixed=bool(joining),
        account=plan.account._replace(oldest=oldest_of(longs) in chosen),
    )


def instead_of_slices(
    now: float, plan: Plan, shorts: Sequence[Waiting], longs: Sequence[Waiting], sizes: Sizes, *, within_s: float,
    rows: int, rows_s: float, share: float, per_s: float,
) -> Plan | None:  # fmt: skip
    """Return the plan, a long batch in slices, as a shorter one that carries the rows, if that pays; ``joint_step``.

    `rows_s`: time that the rows add to the step. `share`: share of the device that decode steps in pauses take (0..1).
    `per_s`: rate of arrivals of short requests; they would wait for half of the step.
    """
    if (
        sizes.chunk is None
        or (joint := joint_step(now, plan, shorts, longs, sizes, within_s=within_s, rows=rows)) is None
    ):
        return None
    joining = [shorts[i] for i in plan.picked]
    took_s = whole_s(joint, joining, longs, sizes) + rows_s
    slices_s = whole_s(plan, joining, longs, sizes) * joint.long.tokens / plan.long.tokens / (1.0 - share)
    # The shortest request suffers most.
    weight = per_s * took_s / sizes.lone_s(Waiting(1, 0, now))
    pays = gain(slices_s - took_s, sizes.weight(longs), (weight, -took_s / 2.0)) > 0.0
    if not pays:
        return None
    slices = sizes.slice_layers([longs[i] for i in joint.long.picked], joint.long.tokens)
    return joint._replace(long=LongBatch(joint.long.picked, joint.long.tokens, *slices))


def until_pause_s(plan: Plan, joining: Sequence[Waiting], longs: Sequence[Waiting], sizes: Sizes) -> float:
    """Return the predicted time of a batch from its start to its first pause or its end; 0 if unknown."""
    took_s, long = whole_s(plan, joining, longs, sizes), plan.long
    return took_s * long.layers / (sizes.layers * long.parts) if long.layers and sizes.layers else took_s


def whole_s(plan: Plan, joining: Sequence[Waiting], longs: Sequence[Waiting], sizes: Sizes) -> float:
    """Return the predicted time of a batch without its pauses; 0 if unknown."""
    long = plan.long
    left, shape = long.tokens or sizes.budget, [(w.tokens, w.history) for w in joining if plan.mixed]
    left -= sum(new for new, _ in shape)
    for w in (longs[i] for i in long.picked):
        shape.append((min(w.tokens, max(0, left)), w.history))
        left -= shape[-1][0]
    return sizes.model.predict(shape) or 0.0


def _far(now: float, waiting: Sequence[Waiting], sizes: Sizes) -> bool:
    """Return True if all deadlines of the waiting requests are far."""
    dues = sorted((w.deadline_s - now, sizes.work_s(w)) for w in waiting if w.deadline_s is not None)
    ends_s = accumulate(work_s for _, work_s in dues)
    return all(CALM * end_s <= left_s for end_s, (left_s, _) in zip(ends_s, dues, strict=True))
