"""Order of long prompts in the pacer: least work, the guard, other orders, priorities, and overtaking."""

from __future__ import annotations

from typing import Any

import pytest
from laps_core.config import LapsConfig
from laps_core.length import LONG, SHORT
from laps_core.policy.memory import HOLD_S
from laps_core.policy.order import ORDERS
from laps_core.policy.pacer import Pacer
from laps_core.policy.preemption import DEPTH
from laps_core.policy.types import Waiting
from pacers import CHUNK, GAP, KNOWN, long, pacer, paused, run, short


def order_of(me: Pacer, now: float, longs: list[Waiting]) -> list[int]:
    """Return the order in which these prompts would run if each had its own batch."""
    left, found = list(range(len(longs))), []
    while left:
        first = left[me.plan(now, [], [longs[i] for i in left]).long.picked[0]]
        found.append(first)
        left.remove(first)
    return found


def test_the_least_work_goes_first() -> None:
    me = pacer()
    assert order_of(me, 1.0, [long(3000), long(900), long(20_000, done=19_500), long(900, -1.0)]) == [2, 3, 1, 0]
    cached = Waiting(300, 100_000, 0.0, None, 300)
    assert order_of(pacer(), 1.0, [long(400), cached]) == [1, 0]


def test_an_order_is_a_function_and_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ORDERS, "largest", lambda w, work_s, lone_s, now: (-w.tokens, w.since_s))
    config = LapsConfig(wait_window_ms=0.0)
    object.__setattr__(config, "order", "largest")
    me = Pacer(config, chunk_tokens=CHUNK, model=KNOWN.model())
    assert order_of(me, 1.0, [long(900), long(20_000), long(3000)]) == [1, 2, 0]


def test_an_idle_server_runs_the_small_one_alone_and_a_loaded_one_fills_the_batch() -> None:
    longs = [long(2000 + i) for i in range(3)]
    assert pacer().plan(0.0, [], longs).long.picked == (0,)
    crowd = [long(9000)] * 100
    assert pacer().plan(0.0, [], [*longs, *crowd]).long.picked[:3] == (0, 1, 2)


def test_short_requests_wait_behind_a_long_batch_too() -> None:
    longs = [long(300), long(700)]
    assert pacer().plan(0.0, [], longs).long.picked == (0,)
    assert pacer().plan(0.0, [short("a")], longs).long.picked == (0, 1)


def test_what_others_have_earned_puts_the_oldest_first() -> None:
    me = pacer()
    longs = [long(20_000, 0.0), long(600, 1.0), long(500, 2.0)]
    plan = me.plan(3.0, [], longs)
    assert plan.long.picked[0] == 2
    assert not plan.account.oldest
    run(me, plan, 3.0, 3.02, (500, 0), stock=False)
    assert me.guard.due()
    plan = me.plan(3.1, [], longs[:2])
    assert plan.long.picked[0] == 0
    assert plan.account.oldest
    run(me, plan, 3.1, 3.3, (CHUNK, 0), stock=False)
    assert not me.guard.due()
    assert me.plan(3.4, [], [long(20_000, 0.0, done=CHUNK), longs[1]]).long.picked[0] == 1


def test_nobody_is_cut_into_the_batch_of_another() -> None:
    alone = pacer(chunk=4096).plan(1.0, [], [long(6000, 0.0), long(4000, 1.0), *[long(9000, 2.0)] * 98])
    assert (alone.long.picked, alone.long.tokens, alone.account.oldest) == ((1,), 4000, False)
    whole = pacer().plan(1.0, [], [long(4100, 0.0), long(4000, 1.0), *[long(9000, 2.0)] * 98])
    assert (whole.long.picked, whole.account.oldest) == ((1, 0), True)
    first = pacer(chunk=4096).plan(1.0, [], [long(6000, 0.0), long(7000, 1.0)])
    assert (first.long.picked, first.account.oldest) == ((0,), True)


@pytest.mark.parametrize("order", list(ORDERS))
def test_the_guard_holds_under_every_order(order: str) -> None:
    me, turns = pacer(order=order), 0
    for turns in range(1, 40):
        now = float(turns)
        plan = me.plan(now, [], [long(9000, 0.0), long(8000, now, deadline=now + 60.0)])
        run(me, plan, now, now + 0.2, (CHUNK, 0), stock=False)
        if plan.long.picked[0] == 0:
            break
    assert turns == (1 if order == "fcfs" else 2)


def test_without_a_guard_the_least_work_is_always_first() -> None:
    me = pacer(guard=0.0)
    for i in range(50):
        plan = me.plan(float(i), [], [long(20_000, 0.0), long(500, float(i))])
        assert plan.long.picked[0] == 1
        run(me, plan, float(i), i + 0.1, (500, 0), stock=False)


def test_the_guard_forgets_what_was_earned_when_no_long_work_is_left() -> None:
    for forget in (lambda me: me.record_empty_queue(), lambda me: me.plan(2.0, [short("a")], [])):
        me = pacer()
        run(me, me.plan(0.0, [], [long(20_000, 0.0), long(500, 1.0)]), 1.0, 1.1, (500, 0), stock=False)
        assert me.guard.due()
        forget(me)
        assert not me.guard.due()


def test_the_guard_stands_back_for_what_found_no_memory() -> None:
    me = pacer()
    longs = [long(20_000, 0.0), long(500, 1.0)]
    run(me, me.plan(1.0, [], longs), 1.0, 1.1, (500, 0), stock=False)
    assert me.plan(1.1, [], longs, lacking=True).long.picked[0] == 0
    later = me.plan(1.2 + HOLD_S, [], longs, lacking=True)
    assert (later.held, later.long.picked[0]) == ("", 1), "room was kept for it in vain"
    assert me.plan(1.3 + HOLD_S, [], longs).long.picked[0] == 0


@pytest.mark.parametrize("order", ["fcfs", "lars", "s-edf"])
def test_the_other_orders_are_what_they_say(order: str) -> None:
    longs = [
        long(900, 0.3, deadline=50.0),
        long(20_000, 0.2, deadline=40.0),
        long(900, 0.1),
        long(900, 0.0, deadline=0.5),
    ]
    expected = {"fcfs": [3, 2, 1, 0], "lars": [3, 1, 0, 2], "s-edf": [1, 0, 2, 3]}
    assert order_of(pacer(order=order), 1.0, longs) == expected[order]


def test_a_higher_priority_comes_before_work_and_guard() -> None:
    me = pacer()
    longs = [long(500, 0.0), long(20_000, 1.0, priority=-1), long(30_000, 2.0, priority=-1)]
    for i in range(3):
        plan = me.plan(3.0 + i, [], longs)
        assert plan.long.picked[0] == 1
        run(me, plan, 3.0 + i, 3.2 + i, (CHUNK, 0), stock=False)


def test_for_a_short_request_of_higher_priority_nothing_long_overtakes() -> None:
    longs = [long(400, 0.9)]
    assert pacer().plan(1.0, [], longs, paused=paused(1.0)).order == (LONG,)
    assert pacer().plan(1.0, [], longs, paused=paused(1.0), urgent=SHORT).order == ()


def test_nothing_of_lower_priority_overtakes_what_is_paused() -> None:
    plan = pacer().plan(1.0, [], [long(400, priority=1), long(500, priority=0)], paused=paused(1.0))
    assert plan.long.picked == (1,)
    assert pacer().plan(1.0, [], [long(400, priority=1)], paused=paused(1.0)).order == ()


def test_what_is_much_smaller_overtakes_what_is_paused() -> None:
    me = pacer()
    longs = [long(9000), long(400), long(300), long(50_000, done=49_900)]
    plan = me.plan(1.0, [], longs, paused=paused(0.5))
    assert (plan.order, plan.long.picked) == ((LONG,), (2, 1))
    assert plan.long.tokens == 700
    assert me.plan(1.0, [], longs, paused=paused(0.01)).order == (), "what is paused is nearly done"
    assert me.plan(1.0, [], longs, paused=paused(0.5, depth=DEPTH)).order == ()
    assert me.plan(1.0, [], [*longs, *[long(900)] * 400], paused=paused(0.5)).order == (), (
        "all of them would pay for it"
    )


def test_a_short_batch_goes_before_one_that_overtakes() -> None:
    assert pacer().plan(1.0, [short("a")], [long(400)], paused=paused(0.5)).order == (SHORT,)


def test_what_was_overtaken_has_a_gap_before_it_is_again() -> None:
    me, one = pacer(), [long(400, 1.0)]
    plan = me.plan(1.0, [], one, paused=paused(0.5))
    run(me, plan, 1.0, 1.02, (400, 0), stock=False, within=True)
    assert me.status(2.0)["preemption"]["by_smaller_prompts"] == 1
    assert me.guard.due(), "the oldest is paused, and has earned it"
    for left_s, again in ((0.5, False), (0.5 - GAP + 1e-6, False), (0.5 - GAP - 1e-6, True)):
        assert bool(me.plan(9.0, [], one, paused=paused(left_s)).order) == again
    assert me.plan(9.0, [], one, paused=paused(0.6)).order == (LONG,), "another batch"


@pytest.mark.parametrize("knobs", [{"known": False}, {"order": "fcfs"}, {"order": "lars"}])
def test_nothing_overtakes_by_guesswork_or_against_the_order(knobs: dict[str, Any]) -> None:
    assert pacer(**knobs).plan(1.0, [], [long(300)], paused=paused(9.0)).order == ()
