"""Orders of long prompts: sort keys, smaller keys first. Prompts with equal keys keep their order of arrival.

Add a new order to ``ORDERS`` and to the knob: the type of ``LapsConfig.order`` has the same names. The guard bounds how
long any order leaves a prompt behind.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate, islice

from laps_core.policy.predict import Sizes
from laps_core.policy.types import Paused, Waiting

Key = tuple[float, ...]
Order = Callable[[Waiting, float, float, float], Key]
"""Sort key from (request, predicted remaining work, predicted time of the whole request alone, now; seconds). A
paused batch comes as a request without tokens, with its remaining work."""

_IN_TIME, _NO_DEADLINE, _LATE = 0.0, 1.0, 2.0


def slack_s(w: Waiting, work_s: float, now: float) -> float:
    """Return deadline - now - remaining work (seconds); infinite without a deadline."""
    return math.inf if w.deadline_s is None else w.deadline_s - now - work_s


def least_work(w: Waiting, work_s: float, lone_s: float, now: float) -> Key:
    """Sort by least remaining work, late prompts last. If this would make a prompt late that can be in time,
    ``service_order`` moves the prompts that can be in time to the front."""
    late = slack_s(w, work_s, now) < 0.0
    return late, work_s, w.since_s


def fcfs(w: Waiting, work_s: float, lone_s: float, now: float) -> Key:
    """Sort by arrival: first come, first served."""
    return (w.since_s,)


def lars(w: Waiting, work_s: float, lone_s: float, now: float) -> Key:
    """Sort by slack relative to total work, smallest first (Medha). Prompts without a deadline go last, by arrival."""
    return slack_s(w, work_s, now) / max(lone_s, 1e-9), w.since_s


def s_edf(w: Waiting, work_s: float, lone_s: float, now: float) -> Key:
    """Sort by sgn(slack) / deadline, largest first (FlowPrefill).

    Prompts in time go first, earliest deadline first. Late prompts go last, latest deadline first (the least late
    first). Prompts with zero slack or no deadline (the limit of the formula) go in between, by arrival.
    """
    slack = slack_s(w, work_s, now)
    if w.deadline_s is None or slack == 0.0:
        return _NO_DEADLINE, w.since_s, 0.0
    if slack < 0.0:
        return _LATE, -w.deadline_s, w.since_s
    return _IN_TIME, w.deadline_s, w.since_s


LEAST_WORK = "least-work"
ORDERS: dict[str, Order] = {LEAST_WORK: least_work, "fcfs": fcfs, "lars": lars, "s-edf": s_edf}


def service_order(
    order: Order, waiting: Sequence[Waiting], sizes: Sizes, now: float, paused: Paused | None = None
) -> list[int]:
    """Return the indices of ``waiting`` in service order at ``now`` (seconds): by priority, then by ``order``. With
    ``paused``, return only the prompts that go before the paused batch."""
    items, works = [*waiting], [sizes.work_s(w) for w in waiting]
    if paused is not None:
        items.append(Waiting(0, 0, -math.inf, paused.due_s(now), priority=paused.priority))
        works.append(paused.left_s)
    # Hundreds of requests can wait, so predict only what the order reads.
    lone = [*map(sizes.lone_s, waiting), *works[len(waiting) :]] if order is lars else works

    def key(i: int) -> tuple[int, Key]:
        return items[i].priority, order(items[i], works[i], lone[i], now)

    turns = sorted(range(len(items)), key=key)
    due = order is least_work and any(w.deadline_s is not None for w in items)
    if due and (late := _late(turns, items, works, now)):
        rank = {i: n for n, i in enumerate(in_time(items, works, now))}
        if not late.isdisjoint(rank):
            turns.sort(key=lambda i: (items[i].priority, rank.get(i, len(rank))))
    return turns if paused is None else turns[: turns.index(len(waiting))]


def short_turns(
    order: Order, shorts: Sequence[Waiting], sizes: Sizes, now: float, budget: int, guard: float
) -> list[int]:
    """Return the indices of short requests, sorted by arrival, in service order. If a batch of `budget` tokens does not
    hold them all, the first ones get the share `guard` of it, at least one of them, and the rest goes by `order`."""
    ends = list(accumulate(w.tokens for w in shorts))
    if ends[-1] <= budget:
        return list(range(len(shorts)))
    first = max(bisect_right(ends, guard * budget), 1 if guard else 0)
    return [*range(first), *(first + i for i in service_order(order, shorts[first:], sizes, now))]


def _late(turns: Sequence[int], items: Sequence[Waiting], works: Sequence[float], now: float) -> set[int]:
    """Return the indices of the items that miss their deadlines if served in the order of `turns`."""
    ends = islice(accumulate((works[i] for i in turns), initial=now), 1, None)
    return {i for i, end in zip(turns, ends, strict=True) if slack_s(items[i], 0.0, end) < 0.0}


def in_time(items: Sequence[Waiting], works: Sequence[float], now: float) -> list[int]:
    """Return the indices of as many items as can meet their deadlines one after the other, earliest deadline first.

    If not all can, the largest item is left out (Moore and Hodgson's algorithm: no other choice has more in time).
    """
    due = [(w.deadline_s, w.since_s, i) for i, w in enumerate(items) if w.deadline_s is not None]
    found: list[tuple[float, int, int]] = []
    end = now
    for n, (deadline_s, _, i) in enumerate(sorted(due)):
        heapq.heappush(found, (-works[i], n, i))
        end += works[i]
        if end > deadline_s:
            end += heapq.heappop(found)[0]
    return [i for _, _, i in sorted(found, key=lambda one: one[1])]
