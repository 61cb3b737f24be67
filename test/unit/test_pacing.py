"""The policy put together, without a server."""

from __future__ import annotations

from sglang_laps.pacing import LongWork, Pacer, Waiting
from sglang_laps.policy.config import LapsConfig
from sglang_laps.policy.length import LONG, SHORT


def pacer(**knobs: object) -> Pacer:
    config = LapsConfig(**{"wait_window_ms": 0.0, **knobs})  # type: ignore[arg-type]
    return Pacer(config, threshold=256, chunk_tokens=1024, page_size=1)


def waiting(key: str, tokens: int = 50, arrival: float = 0.0, deadline: float | None = None) -> Waiting:
    return tokens, 0, arrival, deadline, key


def test_short_first_and_all_of_them_in_order() -> None:
    plan = pacer().plan(1.0, [waiting("a"), waiting("b")], [], short=True, long=LongWork(5000, 0))
    assert plan.order == (SHORT, LONG)
    assert plan.picked == (0, 1)


def test_nothing_waits_and_nothing_runs() -> None:
    assert pacer().plan(1.0, [], [], short=False, long=None).order == ()


def test_a_batch_stays_within_the_chunk() -> None:
    plan = pacer().plan(1.0, [waiting(str(i), 200) for i in range(9)], [], short=True, long=None)
    assert plan.picked == (0, 1, 2, 3, 4)


def test_deadlines_order_both_classes_when_asked() -> None:
    shorts = [
        waiting("late", deadline=0.5),
        waiting("none"),
        waiting("second", deadline=9.0),
        waiting("first", deadline=5.0),
    ]
    longs = [waiting("x", 5000, deadline=90.0), waiting("y", 5000, deadline=50.0)]
    plan = pacer(order="edf").plan(1.0, shorts, longs, short=True, long=LongWork(5000, 0))
    assert plan.picked == (3, 2, 1, 0)
    assert plan.long_first == 1
    plain = pacer().plan(1.0, shorts, longs, short=True, long=LongWork(5000, 0))
    assert plain.picked == (1, 2, 3, 0)  # only what is too late goes last
    assert plain.long_first == 0


def test_the_long_class_is_owed_after_enough_short_time() -> None:
    me = pacer(long_share=0.5)
    alone = me.plan(0.0, [], [], short=False, long=LongWork(9, 0))
    me.finished(me.launched(0.0, LONG, 1, alone, contended=False), 0.0, 0.1, 0.1, [(9, 0)], stock=True)
    plan = me.plan(0.1, [waiting("a")], [], short=True, long=LongWork(9, 0))
    assert plan.order[0] is SHORT
    me.finished(me.launched(0.1, SHORT, 1, plan, contended=True), 0.1, 0.3, 0.3, [(50, 0)], stock=True)
    assert me.plan(0.3, [waiting("b")], [], short=True, long=LongWork(9, 0)).order[0] is LONG


def test_a_smaller_long_chunk_can_be_asked_for() -> None:
    assert pacer(long_chunk_tokens=128).plan(0.0, [], [], short=False, long=LongWork(5000, 0)).chunk_tokens == 128
    assert pacer(long_chunk_tokens=9999).plan(0.0, [], [], short=False, long=LongWork(5000, 0)).chunk_tokens == 1024
