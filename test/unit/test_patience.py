"""Nobody waits for ever, whatever the order and however long the overload lasts."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from laps_core.config import LapsConfig
from laps_core.length import LONG, SHORT
from laps_core.policy.fairness import OLDEST_EVERY
from laps_core.policy.pacer import Pacer
from laps_core.policy.types import Plan, Running, Waiting

BUDGET = 1024
ORDERS = ["fcfs", "edf", "lars", "s-edf"]
# Late ones, some without a deadline, and those that can make it.
deadlines = st.sampled_from([-1.0, -0.001, None, 0.5, 2.0, 9.0])
requests = st.tuples(st.integers(100, 256), deadlines)
# More than a batch holds.
arriving = st.lists(st.lists(requests, min_size=6, max_size=12), min_size=10, max_size=30)


def pacer(order: Any) -> Pacer:
    config = LapsConfig(wait_window_ms=0.0, order=order)
    return Pacer(config, chunk_tokens=BUDGET)


def sent(me: Pacer, now: float, plan: Plan) -> Running:
    """The first batch of the plan goes to the device."""
    cls, count = plan.order[0], len(plan.picked)
    batch = Running(
        cls=cls, shape=[(100, 0)] * count, short=range(count if cls is SHORT else 0), started=now, stock=False
    )
    me.launched(now, batch, plan)
    return batch


def coming(now: float, batch: list[tuple[int, float | None]], longer: int = 0) -> list[Waiting]:
    return [
        Waiting(tokens + longer, 0, now + 1e-6 * n, None if left is None else now + left)
        for n, (tokens, left) in enumerate(batch)
    ]


@given(arriving, st.sampled_from(["least-work", *ORDERS]), st.booleans())
@settings(max_examples=100, deadline=None)
def test_the_oldest_short_request_is_served_within_its_turns(
    arrivals: list[list[tuple[int, float | None]]], order: Any, window: bool
) -> None:
    me = pacer(order)
    if window:
        me = Pacer(LapsConfig(order=order), chunk_tokens=BUDGET)
    waiting: list[Waiting] = []
    oldest, turns, now = None, 0, 0.0
    for batch in arrivals:
        now += 0.05
        waiting += coming(now, batch)
        if not waiting:
            continue
        plan = me.plan(now, waiting, [])
        if plan.held == "window":
            continue
        head = min(w.since_s for w in waiting)
        turns = turns + 1 if head == oldest else 1
        oldest = head
        me.ended(sent(me, now, plan), None, now + 0.01)
        served = {waiting[p].since_s for p in plan.picked}
        assert served
        assert head in served or turns < OLDEST_EVERY
        waiting = [w for w in waiting if w.since_s not in served]


@given(arriving, st.sampled_from(ORDERS))
@settings(max_examples=100, deadline=None)
def test_the_oldest_long_request_is_served_within_its_turns(
    arrivals: list[list[tuple[int, float | None]]], order: str
) -> None:
    me = pacer(order)
    waiting: list[Waiting] = []
    oldest, turns, now = None, 0, 0.0
    for batch in arrivals:
        now += 0.05
        waiting += coming(now, batch, longer=300)
        if not waiting:
            continue
        plan = me.plan(now, [], waiting, waiting=1)
        head = min(w.since_s for w in waiting)
        turns = turns + 1 if head == oldest else 1
        oldest = head
        sent(me, now, plan)
        served = {waiting[i].since_s for i in plan.long.picked}
        assert head in served or turns < OLDEST_EVERY
        waiting = [w for w in waiting if w.since_s not in served]


@pytest.mark.parametrize("order", ["least-work", "fcfs"])
def test_a_late_request_does_not_wait_for_ever_while_others_can_make_it(order: str) -> None:
    me = pacer(order)
    waiting: list[Waiting] = [Waiting(200, 0, 0.0, 0.1)]
    for turn in range(1, 100):
        now = float(turn)
        waiting += [Waiting(200, 0, now + 1e-6 * n, now + 5.0) for n in range(6)]  # more than a batch holds
        plan = me.plan(now, waiting, [])
        sent(me, now, plan)
        served = {waiting[p].since_s for p in plan.picked}
        waiting = [w for w in waiting if w.since_s not in served]
        if 0.0 in served:
            break
    assert turn == OLDEST_EVERY


def test_the_short_batch_after_a_failed_long_one_keeps_its_order() -> None:
    me = pacer("edf")
    shorts = [
        Waiting(50, 0, 0.0, 0.5),
        Waiting(50, 0, 0.1, None),
        Waiting(50, 0, 0.2, 9.0),
        Waiting(50, 0, 0.3, 5.0),
    ]
    work = [Waiting(5000, 0, 0.0)]
    plan = me.plan(1.0, shorts, work, urgent=LONG)
    assert plan.order == (LONG, SHORT)
    assert plan.picked == (3, 2, 1, 0)
    assert plan.account.late == 1
    many = [Waiting(200, 0, 0.0, 0.5), *(Waiting(200, 0, 0.5, 9.0) for _ in range(9))]
    assert pacer("fcfs").plan(1.0, many, work, urgent=LONG).picked == (1, 2)


def test_a_hold_ends_with_the_requests_that_were_held() -> None:
    config = LapsConfig(window="fixed", wait_window_ms=5.0)
    me = Pacer(config, chunk_tokens=BUDGET)
    for forget in (
        lambda now: me.nothing_waits(),
        lambda now: me.plan(now, [], [Waiting(5000, 0, 0.0)]),
    ):
        me.arrived(1.0, 1)
        assert me.plan(1.0, [Waiting(50, 0, 1.0, None)], []).held == "window"
        forget(1.001)
        me.arrived(600.0, 1)
        later: list[Waiting] = [Waiting(50, 0, 600.0, None)]
        assert me.plan(600.0, later, []).held == "window"
        plan = me.plan(600.006, later, [])
        assert (plan.order, plan.account.reason) == ((SHORT,), "window")
        assert plan.account.waited_s < 0.01
        sent(me, 600.006, plan)
