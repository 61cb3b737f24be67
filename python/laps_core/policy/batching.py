"""Batches of long prompts: first in order, and those who join as long as that pays. Beyond the paper."""

from __future__ import annotations

import math
from collections.abc import Sequence

from laps_core.length import LONG
from laps_core.policy.exchange import gain
from laps_core.policy.fairness import Gap, Guard
from laps_core.policy.order import ORDERS, line, slack_s
from laps_core.policy.predict import Sizes
from laps_core.policy.types import LOOKAHEAD, LongBatch, Plan, Waiting


def pack(
    items: Sequence[Waiting], sizes: Sizes, *, budget: int, waiting: int, left_s: float | None = None
) -> list[int]:
    """Indices of the first of `items`, and of those behind it that it pays to take along, in order.

    An idle server runs small batches, each first token as early as can be; a loaded one fills them. Only a prompt of
    its own is cut: the piece of another would delay a batch and be a first token to nobody. Where the first has to end
    within `left_s` (seconds), others go along that fit into that time (FlowPrefill, SLO-aware batching).

    items: in the order to serve them. budget: new tokens a batch may hold. waiting: requests that wait, these included.
    A batch holds one prompt in progress at most, as SGLang has one slot for it.
    """
    picked: list[int] = []
    room, slot_taken = budget, False
    for i, item in enumerate(items):
        if room <= 0:
            break
        if item.started and slot_taken:
            continue
        seconds = sizes.beside_s(item)
        if picked and left_s is not None and (item.tokens > room or seconds > left_s):
            continue
        if picked and left_s is None:
            saved_s = math.inf if sizes.fixed_s is None else sizes.fixed_s
            if item.tokens > room or gain(saved_s, waiting - len(picked), (len(picked), -seconds)) < 0.0:
                break
        picked.append(i)
        room -= min(item.tokens, room)
        left_s = None if left_s is None else left_s - seconds
        slot_taken |= item.started
    return picked


def ends_s(first: Waiting, sizes: Sizes, now: float) -> float | None:
    """Time within which a batch has to end for its first prompt to be in time, less the fixed time of its step
    (seconds); None without a deadline, or if that one is too late."""
    slack = slack_s(first, sizes.work_s(first), now)
    return slack + sizes.work_s(first) - (sizes.fixed_s or 0.0) if 0.0 <= slack < math.inf else None


def oldest_of(longs: Sequence[Waiting]) -> int:
    """Index of the prompt that has waited longest."""
    return min(range(len(longs)), key=lambda i: longs[i].since_s)


class LongBatches:
    """Makes the batches of long prompts. Times are seconds of one clock, lengths tokens."""

    def __init__(self, order: str, sizes: Sizes, gap: Gap, guard: Guard) -> None:
        """`order`: a name in ORDERS."""
        self.order = ORDERS[order]
        self._sizes, self._gap, self._guard = sizes, gap, guard

    def add_next(
        self, plan: Plan, now: float, longs: Sequence[Waiting], waiting: int, *, joining: Sequence[Waiting] = (),
        oldest_first: bool | None = None,
    ) -> Plan:  # fmt: skip
        """The plan with the next long batch. `waiting`: how many wait in all. `joining`: short requests that share the
        step where it cannot be paused. `oldest_first`: the oldest prompt leads; None = if the guard says so."""
        if not longs:
            return plan
        sizes, turns = self._sizes, line(self.order, longs, self._sizes, now)
        oldest = oldest_of(longs)
        if oldest_first is None:
            oldest_first = self._guard.due() and longs[oldest].priority == longs[turns[0]].priority
        if oldest_first:
            turns.remove(oldest)
            turns.insert(0, oldest)
        batch = [longs[i] for i in turns]
        budget, joined = sizes.budget // sizes.unit * sizes.unit, 0
        if not sizes.layers and sizes.chunk is not None:
            joined = sizes.joining(joining)
            budget = sizes.timely_chunk(batch[0], joined, self._gap.least_s)
        packed = pack(batch, sizes, budget=budget, waiting=waiting, left_s=ends_s(batch[0], sizes, now))
        plan = self.cut(plan, longs, [turns[i] for i in packed], budget, joined)
        late = slack_s(longs[oldest], sizes.work_s(longs[oldest]), now) < 0.0
        account = plan.account._replace(oldest=oldest in plan.long.picked, oldest_late=late)
        return plan._replace(mixed=joined > 0, account=account)

    def cut(self, plan: Plan, longs: Sequence[Waiting], picked: Sequence[int], budget: int, joining: int = 0) -> Plan:
        """The plan with a batch of these, of which the last is cut where the budget (tokens) ends."""
        sizes, picked = self._sizes, tuple(picked[:LOOKAHEAD])
        batch = [longs[i] for i in picked]
        tokens = min(budget, sum(w.tokens for w in batch))
        holds = 0 if sizes.chunk is None else min(sizes.budget, sizes.whole_units(tokens) + joining)
        return plan._replace(order=(LONG,), long=LongBatch(picked, holds, *sizes.slice_layers(batch, tokens)))
