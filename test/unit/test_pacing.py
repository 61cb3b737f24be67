"""The policy put together, without a server."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from sglang_laps.pacing import LongWork, Pacer, Plan, Waiting
from sglang_laps.policy.config import LapsConfig
from sglang_laps.policy.length import LONG, SHORT


def pacer(**knobs: object) -> Pacer:
    config = LapsConfig(**{"wait_window_ms": 0.0, **knobs})  # type: ignore[arg-type]
    return Pacer(config, threshold=256, chunk_tokens=1024, page_size=1)


def waiting(key: str, tokens: int = 50, arrival: float = 0.0, deadline: float | None = None) -> Waiting:
    return tokens, 0, arrival, deadline, key


def work(tokens: int, since: float = 0.0) -> LongWork:
    return LongWork(tokens, 0, since, tokens)


def run(me: Pacer, plan: Plan, begin: float, end: float, *shape: tuple[int, int]) -> None:
    cls = plan.order[0]
    launch = me.launched(begin, cls, len(shape), plan, contended=len(plan.order) > 1)
    me.finished(launch, begin, end, end, shape, stock=True)


def test_short_first_and_all_of_them_in_order() -> None:
    plan = pacer().plan(1.0, [waiting("a"), waiting("b")], [], short=True, long=work(5000))
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
    plan = pacer(order="edf").plan(1.0, shorts, longs, short=True, long=work(5000))
    assert plan.picked == (3, 2, 1, 0)
    assert plan.long_first == 1
    plain = pacer().plan(1.0, shorts, longs, short=True, long=work(5000))
    assert plain.picked == (1, 2, 3, 0)  # only what is too late goes last
    assert plain.long_first == 0


def test_the_long_class_is_owed_after_enough_short_time() -> None:
    me = pacer(long_share=0.5)
    alone = me.plan(0.0, [], [], short=False, long=work(9))
    me.finished(me.launched(0.0, LONG, 1, alone, contended=False), 0.0, 0.1, 0.1, [(9, 0)], stock=True)
    plan = me.plan(0.1, [waiting("a")], [], short=True, long=work(9))
    assert plan.order[0] is SHORT
    me.finished(me.launched(0.1, SHORT, 1, plan, contended=True), 0.1, 0.3, 0.3, [(50, 0)], stock=True)
    assert me.plan(0.3, [waiting("b")], [], short=True, long=work(9)).order[0] is LONG


def test_a_smaller_long_chunk_can_be_asked_for() -> None:
    assert pacer(long_chunk_tokens=128).plan(0.0, [], [], short=False, long=work(5000)).chunk_tokens == 128
    assert pacer(long_chunk_tokens=9999).plan(0.0, [], [], short=False, long=work(5000)).chunk_tokens == 1024


def behind(**knobs: object) -> Pacer:
    """A pacer whose long batches take 0.1 ms a token, after a short batch."""
    me = pacer(**knobs)
    run(me, me.plan(0.0, [], [], short=False, long=work(1000)), 0.0, 0.1, (1000, 0))
    plan = me.plan(0.1, [waiting("a")], [], short=True, long=work(1000, 0.1))
    assert plan.order[0] is SHORT
    run(me, plan, 0.1, 0.11, (50, 0))
    return me


def test_a_long_class_that_is_behind_gets_a_chunk_after_each_short_batch() -> None:
    me = behind()
    shorts = [waiting("b")]
    # 1,000 tokens take 0.1 s, at a quarter of the device 0.4 s.
    assert me.plan(0.49, shorts, [], short=True, long=work(1000, 0.1)).order[0] is SHORT
    plan = me.plan(0.51, shorts, [], short=True, long=work(1000, 0.1))
    assert plan.order == (LONG, SHORT)
    assert not plan.keeps_room
    run(me, plan, 0.51, 0.61, (1000, 0))
    assert me.status(1.0)["fairness"]["spare_batches"] == 1
    assert me.status(1.0)["fairness"]["credit_s"] == 0.0  # spent, but no debt
    assert me.plan(0.62, shorts, [], short=True, long=work(1000, 0.1)).order[0] is SHORT


def test_it_does_not_catch_up_where_short_requests_need_the_time() -> None:
    many = [waiting(str(i), 200) for i in range(6)]
    assert behind().plan(9.0, many, [], short=True, long=work(1000)).order[0] is SHORT
    assert behind(long_share=0.0).plan(9.0, many[:1], [], short=True, long=work(1000)).order[0] is SHORT
    urgent = behind().plan(9.0, many[:1], [], short=True, long=work(1000), urgent=SHORT)
    assert urgent.order[0] is SHORT


def test_it_does_not_catch_up_in_the_little_time_that_a_deadline_leaves() -> None:
    me = behind()
    me.model.predict = lambda requests: sum(1e-4 * new for new, _ in requests)  # type: ignore[method-assign]
    soon, later = ([waiting("b", arrival=8.99, deadline=9.0 + left)] for left in (0.04, 0.5))
    assert me.plan(9.0, soon, [], short=True, long=work(1000)).order[0] is SHORT
    assert me.plan(9.0, later, [], short=True, long=work(1000)).order[0] is LONG


def fitted(me: Pacer, at: float = 0.0) -> Pacer:
    """Measured steps of 1 ms and 0.1 ms a token."""
    for i in range(40):
        tokens = 20 + 40 * (i % 12)
        run(
            me,
            me.plan(at, [waiting("a", tokens)], [], short=True, long=None),
            at,
            at + 1e-3 + 1e-4 * tokens,
            (tokens, 0),
        )
        at += 0.1
    assert me.model.fitted
    return me


@pytest.mark.parametrize("uptime", [4.2, 1e6])
def test_the_latency_model_is_saved_at_the_first_idle_moment_however_young_the_machine_is(
    tmp_path: Path, uptime: float
) -> None:
    path = tmp_path / "model.json"
    me = fitted(pacer(profile_save_path=str(path)))
    me.save_when_due(uptime)
    assert path.exists()
    path.unlink()
    run(me, me.plan(uptime, [waiting("a")], [], short=True, long=None), uptime, uptime + 0.01, (50, 0))
    me.save_when_due(uptime + 9.0)
    assert not path.exists()
    me.save_when_due(uptime + 10.0)
    assert path.exists()


def test_chunks_leave_room_for_requests_to_come_without_a_window_too() -> None:
    me = fitted(pacer(ttft_slo_ms=50.0))
    full = me.plan(60.0, [], [], short=False, long=work(5000)).chunk_tokens
    assert full == 1024
    for i in range(400):
        me.arrived(60.0 + i / 100, 1)
    # Short requests come every 10 ms, and a full chunk takes 103 ms.
    assert me.plan(64.0, [], [], short=False, long=work(5000)).chunk_tokens < 500


def test_asking_for_the_status_changes_nothing() -> None:
    me = pacer(length_threshold="auto", threshold_period_s=0.0, wait_window_ms=5.0, ttft_slo_ms=400.0)
    fitted(me)
    me.slo.record(4.0, "short", 0.7, 0.4)
    before = pickle.dumps(me)
    first = me.status(5.0)
    me.status(500.0)
    assert pickle.dumps(me) == before
    assert me.status(5.0) == first
