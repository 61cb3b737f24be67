"""Decisions by deadlines: which long prompts preempt a paused batch or share one, and whether waiting misses a deadline
(FlowPrefill, Medha). Whether a short batch preempts: ``Pacer.plan``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from laps_core.latency.model import LatencyModel
from laps_core.policy.order import Order, line, slack_s
from laps_core.policy.packing import Beside
from laps_core.policy.plan import Paused, Waiting
from laps_core.policy.sizes import Sizes


@dataclass(frozen=True)
class _Known:
    """The times of what is paused, for an order: it is no prompt of so many tokens any more."""

    left_s: float
    whole_s: float

    def work_s(self, w: Waiting) -> float:
        return self.left_s

    def lone_s(self, w: Waiting) -> float:
        return self.whole_s


def _goes_before(order: Order, item: Waiting, paused: Paused, sizes: Sizes, now: float) -> bool:
    """Return True if ``order`` puts a prompt before the paused batch, so that it preempts."""
    if item.deadline_s is None:
        return False
    whole_s = paused.requests / paused.weight if paused.weight else paused.left_s
    known = cast(Any, _Known(paused.left_s, max(whole_s, paused.left_s)))
    batch = Waiting(0, 0, now, paused.deadline_s)
    return order(item, sizes, now)[:-1] < order(batch, known, now)[:-1]


def misses(model: LatencyModel, now: float, picked: Sequence[Waiting], later_s: float) -> bool:
    """Return True if a deadline that can be met now would be missed if the batch ran `later_s` later."""
    deadlines = [w.deadline_s for w in picked if w.deadline_s is not None]
    if not deadlines:
        return False
    done_s = now + (model.predict([(w.tokens, w.history) for w in picked]) or 0.0)
    return any(done_s <= d < done_s + later_s for d in deadlines)


def left_s(first: Waiting, sizes: Sizes, now: float) -> float:
    """Until when a batch has to end for its first prompt to be in time, less the fixed time of its step (seconds from
    now); infinite without a deadline, negative where that one is too late."""
    slack = slack_s(first, sizes, now)
    return slack if slack < 0.0 else slack + sizes.work_s(first) - (sizes.fixed_s or 0.0)


def preempting(
    order: Order, items: Sequence[Waiting], paused: Paused, sizes: Sizes, now: float, budget: int
) -> list[int]:
    """Indices of the prompts that run before what is paused, as ``order`` says; they run whole. `budget`: tokens."""
    first = [i for i in line(order, items, sizes, now) if items[i].tokens <= budget]
    first = [i for i in first if _goes_before(order, items[i], paused, sizes, now)]
    if not first:
        return []
    batch = [items[i] for i in first]
    return [first[i] for i in fill(batch, sizes.beside_s, budget=budget, left_s=left_s(batch[0], sizes, now))]


def fill(items: Sequence[Waiting], beside_s: Beside, *, budget: int, left_s: float) -> list[int]:
    """Indices of the first of `items`, and of those behind it that fit whole into its remaining time (`left_s`) and
    into the `budget` (tokens), in order (FlowPrefill, SLO-aware batching). A batch holds one prompt in progress at
    most."""
    picked: list[int] = []
    room, slot_taken = budget, False
    for i, item in enumerate(items):
        if (picked and (item.tokens > room or beside_s(item) > left_s)) or (item.started and slot_taken):
            continue
        picked.append(i)
        room -= min(item.tokens, room)
        left_s -= beside_s(item)
        slot_taken |= item.started
        if room <= 0 or left_s <= 0.0:
            break
    return picked
