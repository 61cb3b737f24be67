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
from pacers import CHUNK, GAP, PROFILE, long_prompt, make_pacer, paused_prompt, run_batch, short_prompt


def order_of(pacer: Pacer, now: float, longs: list[Waiting]) -> list[int]:
    """Return the order in which these prompts would run if each had its own batch."""
    left, found = list(range(len(longs))), []
    while left:
        first = left[pacer.plan(now, [], [longs[i] for i in left]).long.picked[0]]
        found.append(first)
        left.remove(first)
    return found


def test_least_work_goes_first() -> None:
    pacer = make_pacer()
    assert order_of(
        pacer, 1.0, [long_prompt(3000), long_prompt(900), long_prompt(20_000, done=19_500), long_prompt(900, -1.0)]
    ) == [2, 3, 1, 0]
    cached = Waiting(300, 100_000, 0.0, None, 300)
    assert order_of(make_pacer(), 1.0, [long_prompt(400), cached]) == [1, 0]


def test_pacer_uses_custom_registered_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ORDERS, "largest", lambda w, work_s, lone_s, now: (-w.tokens, w.since_s))
    config = LapsConfig(wait_window_ms=0.0)
    object.__setattr__(config, "order", "largest")
    pacer = Pacer(config, chunk_tokens=CHUNK, model=PROFILE.model())
    assert order_of(pacer, 1.0, [long_prompt(900), long_prompt(20_000), long_prompt(3000)]) == [1, 2, 0]


def test_idle_server_batches_one_prompt_and_loaded_server_several() -> None:
    longs = [long_prompt(2000 + i) for i in range(3)]
    assert make_pacer().plan(0.0, [], longs).long.picked == (0,)
    crowd = [long_prompt(9000)] * 100
    assert make_pacer().plan(0.0, [], [*longs, *crowd]).long.picked[:3] == (0, 1, 2)


def test_waiting_short_requests_enlarge_long_batch() -> None:
    longs = [long_prompt(300), long_prompt(700)]
    assert make_pacer().plan(0.0, [], longs).long.picked == (0,)
    assert make_pacer().plan(0.0, [short_prompt("a")], longs).long.picked == (0, 1)


def test_guard_puts_oldest_prompt_first_after_other_batches() -> None:
    pacer = make_pacer()
    longs = [long_prompt(20_000, 0.0), long_prompt(600, 1.0), long_prompt(500, 2.0)]
    plan = pacer.plan(3.0, [], longs)
    assert plan.long.picked[0] == 2
    assert not plan.account.oldest
    run_batch(pacer, plan, 3.0, 3.02, (500, 0), stock=False)
    assert pacer.guard.due()
    plan = pacer.plan(3.1, [], longs[:2])
    assert plan.long.picked[0] == 0
    assert plan.account.oldest
    run_batch(pacer, plan, 3.1, 3.3, (CHUNK, 0), stock=False)
    assert not pacer.guard.due()
    assert pacer.plan(3.4, [], [long_prompt(20_000, 0.0, done=CHUNK), longs[1]]).long.picked[0] == 1


def test_only_first_prompt_of_batch_may_be_chunked() -> None:
    alone = make_pacer(chunk=4096).plan(
        1.0, [], [long_prompt(6000, 0.0), long_prompt(4000, 1.0), *[long_prompt(9000, 2.0)] * 98]
    )
    assert (alone.long.picked, alone.long.tokens, alone.account.oldest) == ((1,), 4000, False)
    whole = make_pacer().plan(1.0, [], [long_prompt(4100, 0.0), long_prompt(4000, 1.0), *[long_prompt(9000, 2.0)] * 98])
    assert (whole.long.picked, whole.account.oldest) == ((1, 0), True)
    first = make_pacer(chunk=4096).plan(1.0, [], [long_prompt(6000, 0.0), long_prompt(7000, 1.0)])
    assert (first.long.picked, first.account.oldest) == ((0,), True)


@pytest.mark.parametrize("order", list(ORDERS))
def test_guard_bounds_wait_under_every_order(order: str) -> None:
    pacer, turns = make_pacer(order=order), 0
    for turns in range(1, 40):
        now = float(turns)
        plan = pacer.plan(now, [], [long_prompt(9000, 0.0), long_prompt(8000, now, deadline=now + 60.0)])
        run_batch(pacer, plan, now, now + 0.2, (CHUNK, 0), stock=False)
        if plan.long.picked[0] == 0:
            break
    assert turns == (1 if order == "fcfs" else 2)


def test_least_work_always_goes_first_without_guard() -> None:
    pacer = make_pacer(guard=0.0)
    for i in range(50):
        plan = pacer.plan(float(i), [], [long_prompt(20_000, 0.0), long_prompt(500, float(i))])
        assert plan.long.picked[0] == 1
        run_batch(pacer, plan, float(i), i + 0.1, (500, 0), stock=False)


def test_guard_credit_resets_when_no_long_work_waits() -> None:
    for forget in (lambda pacer: pacer.record_empty_queue(), lambda pacer: pacer.plan(2.0, [short_prompt("a")], [])):
        pacer = make_pacer()
        run_batch(
            pacer,
            pacer.plan(0.0, [], [long_prompt(20_000, 0.0), long_prompt(500, 1.0)]),
            1.0,
            1.1,
            (500, 0),
            stock=False,
        )
        assert pacer.guard.due()
        forget(pacer)
        assert not pacer.guard.due()


def test_guard_skips_prompt_after_vain_memory_hold() -> None:
    pacer = make_pacer()
    longs = [long_prompt(20_000, 0.0), long_prompt(500, 1.0)]
    run_batch(pacer, pacer.plan(1.0, [], longs), 1.0, 1.1, (500, 0), stock=False)
    assert pacer.plan(1.1, [], longs, lacking=True).long.picked[0] == 0
    later = pacer.plan(1.2 + HOLD_S, [], longs, lacking=True)
    assert (later.held, later.long.picked[0]) == ("", 1), "room was kept for it in vain"
    assert pacer.plan(1.3 + HOLD_S, [], longs).long.picked[0] == 0


@pytest.mark.parametrize("order", ["fcfs", "lars", "s-edf"])
def test_long_prompts_follow_fcfs_lars_and_s_edf(order: str) -> None:
    longs = [
        long_prompt(900, 0.3, deadline=50.0),
        long_prompt(20_000, 0.2, deadline=40.0),
        long_prompt(900, 0.1),
        long_prompt(900, 0.0, deadline=0.5),
    ]
    expected = {"fcfs": [3, 2, 1, 0], "lars": [3, 1, 0, 2], "s-edf": [1, 0, 2, 3]}
    assert order_of(make_pacer(order=order), 1.0, longs) == expected[order]


def test_higher_priority_overrides_least_work_and_guard() -> None:
    pacer = make_pacer()
    longs = [long_prompt(500, 0.0), long_prompt(20_000, 1.0, priority=-1), long_prompt(30_000, 2.0, priority=-1)]
    for i in range(3):
        plan = pacer.plan(3.0 + i, [], longs)
        assert plan.long.picked[0] == 1
        run_batch(pacer, plan, 3.0 + i, 3.2 + i, (CHUNK, 0), stock=False)


def test_guard_holds_among_prompts_of_highest_priority() -> None:
    pacer = make_pacer()
    longs = [long_prompt(400, 0.0), long_prompt(20_000, 1.0, priority=-1), long_prompt(600, 2.0, priority=-1)]
    for i, first in enumerate((2, 1)):
        plan = pacer.plan(3.0 + i, [], longs)
        assert plan.long.picked[0] == first
        run_batch(pacer, plan, 3.0 + i, 3.1 + i, (600, 0), stock=False)


def test_no_long_prompt_preempts_while_short_work_is_urgent() -> None:
    longs = [long_prompt(400, 0.9)]
    assert make_pacer().plan(1.0, [], longs, paused=paused_prompt(1.0)).order == (LONG,)
    assert make_pacer().plan(1.0, [], longs, paused=paused_prompt(1.0), urgent=SHORT).order == ()


def test_lower_priority_prompt_does_not_preempt_paused_batch() -> None:
    plan = make_pacer().plan(
        1.0, [], [long_prompt(400, priority=1), long_prompt(500, priority=0)], paused=paused_prompt(1.0)
    )
    assert plan.long.picked == (1,)
    assert make_pacer().plan(1.0, [], [long_prompt(400, priority=1)], paused=paused_prompt(1.0)).order == ()


def test_much_smaller_prompts_preempt_paused_batch_if_worthwhile() -> None:
    pacer = make_pacer()
    longs = [long_prompt(9000), long_prompt(400), long_prompt(300), long_prompt(50_000, done=49_900)]
    plan = pacer.plan(1.0, [], longs, paused=paused_prompt(0.5))
    assert (plan.order, plan.long.picked) == ((LONG,), (2, 1))
    assert plan.long.tokens == 700
    assert pacer.plan(1.0, [], longs, paused=paused_prompt(0.01)).order == (), "what is paused is nearly done"
    assert pacer.plan(1.0, [], longs, paused=paused_prompt(0.5, depth=DEPTH)).order == ()
    assert pacer.plan(1.0, [], [*longs, *[long_prompt(900)] * 400], paused=paused_prompt(0.5)).order == (), (
        "all of them would pay for it"
    )


def test_short_batch_goes_before_preempting_long_prompt() -> None:
    assert make_pacer().plan(1.0, [short_prompt("a")], [long_prompt(400)], paused=paused_prompt(0.5)).order == (SHORT,)


def test_paused_batch_runs_for_gap_between_long_preemptions() -> None:
    pacer, one = make_pacer(), [long_prompt(400, 1.0)]
    plan = pacer.plan(1.0, [], one, paused=paused_prompt(0.5))
    run_batch(pacer, plan, 1.0, 1.02, (400, 0), stock=False, within=True)
    assert pacer.status(2.0)["preemption"]["by_smaller_prompts"] == 1
    assert pacer.guard.due(), "the oldest is paused, and has earned it"
    for left_s, again in ((0.5, False), (0.5 - GAP + 1e-6, False), (0.5 - GAP - 1e-6, True)):
        assert bool(pacer.plan(9.0, [], one, paused=paused_prompt(left_s)).order) == again
    assert pacer.plan(9.0, [], one, paused=paused_prompt(0.6)).order == (LONG,), "another batch"


@pytest.mark.parametrize("knobs", [{"known": False}, {"order": "fcfs"}, {"order": "lars"}])
def test_no_long_prompt_preempts_without_model_or_against_order(knobs: dict[str, Any]) -> None:
    assert make_pacer(**knobs).plan(1.0, [], [long_prompt(300)], paused=paused_prompt(9.0)).order == ()
