"""Batches of long prompts: the first prompt in order, and further prompts while adding them pays. Beyond the paper."""

from __future__ import annotations

import math
from collections.abc import Sequence

from laps_core.length import LONG
from laps_core.policy.exchange import gain
from laps_core.policy.fairness import Gap, Guard
from laps_core.policy.order import ORDERS, service_order, slack_s
from laps_core.policy.predict import Sizes
from laps_core.policy.types import LOOKAHEAD, LongBatch, Plan, Waiting


def pack(items: Sequence[Waiting], sizes: Sizes, *, budget: int, waiting: int, now: float) -> list[int]:
    """Return the indices of the first of `items` and of the later prompts that are worth adding, in order.

    An idle server runs small batches, so that each first token comes early; a loaded server fills its batches. Only a
    prompt alone in its batch is cut: a part of another prompt would delay the batch and give no first token. No prompt
    is added that would make one of the others late for its deadline (FlowPrefill, SLO-aware batching).

    items: in service order. budget: new tokens that the batch may hold. waiting: all waiting requests, with `items`.
    now: start of the batch, by the clock of the deadlines (seconds). A batch holds at most one prompt in progress,
    because SGLang has one slot for such a prompt.
    """
    picked: list[int] = []
    # A batch fills less than its deadlines allow, because others may preempt it: F already holds the time in which a
    # prompt's first tokens are hidden.
    room, slot_taken, took_s, limit_s = budget, False, sizes.fixed_s or 0.0, math.inf
    for i, item in enumerate(items):
        if room <= 0:
            break
        if item.started and slot_taken:
            continue
        seconds = sizes.beside_s(item)
        # SGLang counts whole pages of each request.
        tokens = sizes.whole_units(item.tokens)
        if picked:
            saved_s = math.inf if sizes.fixed_s is None else sizes.fixed_s
            fits = tokens <= room and took_s + seconds <= limit_s
            if not fits and limit_s < math.inf:
                continue
            if not fits or gain(saved_s, waiting - len(picked), (len(picked), -seconds)) < 0.0:
                break
        picked.append(i)
        room -= min(tokens, room)
        took_s += seconds
        slot_taken |= item.started
        ends_at = now + (took_s if len(picked) > 1 else sizes.work_s(item))
        if item.deadline_s is not None and ends_at <= item.deadline_s:
            limit_s = min(limit_s, item.deadline_s - now)
    return picked


def oldest_of(longs: Sequence[Waiting]) -> int:
    """Return the index of the prompt that has waited longest, of those with the highest priority."""
    return min(range(len(longs)), key=lambda i: (longs[i].priority, longs[i].since_s))


class LongBatches:
    """Builder of batches of long prompts. Times are seconds of one clock, lengths are tokens."""

    def __init__(self, order: str, sizes: Sizes, gap: Gap, guard: Guard) -> None:
        """`order`: a name in ORDERS."""
        self.order = ORDERS[order]
        self._sizes, self._gap, self._guard = sizes, gap, guard

    def add_next(
        self, plan: Plan, now: float, longs: Sequence[Waiting], waiting: int, *, joining: Sequence[Waiting] = (),
        oldest_first: bool | None = None,
    ) -> Plan:  # fmt: skip
        """Return the plan with the next long batch. `waiting`: number of waiting requests. `joining`: short requests
        that share the step if it cannot be paused. `oldest_first`: the oldest prompt leads; None: the guard decides."""
        if not longs:
            return plan
        sizes, turns = self._sizes, service_order(self.order, longs, self._sizes, now)
        oldest = oldest_of(longs)
        if oldest_first is None:
            oldest_first = self._guard.due()
        if oldest_first:
            turns.remove(oldest)
            turns.insert(0, oldest)
        batch = [longs[i] for i in turns]
        budget, joined = sizes.budget // sizes.unit * sizes.unit, 0
        if not sizes.layers and sizes.chunk is not None:
            joined = sizes.joining(joining)
            budget = sizes.timely_chunk(batch[0], joined, self._gap.least_s)
        packed = pack(batch, sizes, budget=budget, waiting=waiting, now=now)
        plan = self.cut(plan, longs, [turns[i] for i in packed], budget, joined)
        account = plan.account._replace(oldest=oldest in plan.long.picked, oldest_late=self.is_late(longs[oldest], now))
        return plan._replace(mixed=joined > 0, account=account)

    def is_late(self, w: Waiting, now: float) -> bool:
        """Return True if the prompt is too late for its deadline."""
        return slack_s(w, self._sizes.work_s(w), now) < 0.0

    def cut(self, plan: Plan, longs: Sequence[Waiting], picked: Sequence[int], budget: int, joining: int = 0) -> Plan:
        """Return the plan with a batch of `picked`, the last cut at `budget`. `joining`: tokens of short requests."""
        sizes, picked = self._sizes, tuple(picked[:LOOKAHEAD])
        batch = [longs[i] for i in picked]
        tokens = min(budget, sum(w.tokens for w in batch))
        whole = sizes.whole_units(min(budget, sizes.joining(batch)))
        holds = 0 if sizes.chunk is None else min(sizes.budget, whole + joining)
        return plan._replace(order=(LONG,), long=LongBatch(picked, holds, *sizes.slice_layers(batch, tokens)))
