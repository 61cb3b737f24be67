"""Memory kept for a long request: until it starts, and never so long that short requests hang."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from sglang_laps.pacing import LongWork, Pacer, Plan
from sglang_laps.policy.config import LapsConfig
from sglang_laps.policy.length import LONG, SHORT
from sglang_laps.policy.room import ROOM_S, Room


@given(st.lists(st.floats(1e-3, 1.0), min_size=1, max_size=300))
def test_short_requests_stand_still_for_half_of_the_time_at_most(steps: list[float]) -> None:
    room, now, still, since = Room(), 0.0, 0.0, None
    assert room.kept(now, lacking=False)
    for step in steps:
        kept = room.kept(now, lacking=True)
        if kept and since is None:
            since = now
        now += step
        still += step if kept else 0.0
        assert still <= ROOM_S + now / 2 + (1 + now / ROOM_S) * max(steps)


@given(st.floats(0.0, 100.0), st.floats(1e-3, ROOM_S))
def test_what_drains_in_time_leaves_room_within_its_bound(stuck_s: float, drain_s: float) -> None:
    """Other work gives its memory back after `stuck_s`; short batches drain `drain_s` after the last was built."""
    room, now, built = Room(), 0.0, 0.0
    room.kept(now, lacking=False)
    while now < stuck_s or now < built + drain_s:
        if not room.kept(now, lacking=True):
            built = now
        now += 0.01
        assert now <= stuck_s + ROOM_S + drain_s + 0.1


def test_room_is_kept_for_an_owed_request_only() -> None:
    me = Pacer(LapsConfig(wait_window_ms=0.0), threshold=256, chunk_tokens=1024, page_size=1)
    work = LongWork(5000, 0, 0.0, 5000)
    short = [(50, 0, 0.0, None, "a")]
    me.finished(me.launched(0.0, LONG, 1, Plan(()), contended=False), 0.0, 0.1, 0.1, [(1024, 0)], stock=True)
    plan = me.plan(0.1, short, [], short=True, long=work)
    assert (plan.order, plan.keeps_room) == ((SHORT, LONG), False)
    me.finished(me.launched(0.1, SHORT, 1, plan, contended=True), 0.1, 0.6, 0.6, [(50, 0)], stock=True)
    for at, kept in ((0.6, True), (0.7, True), (0.7 + ROOM_S, False), (0.7 + 2 * ROOM_S, True)):
        plan = me.plan(at, short, [], short=True, long=work, lacking=at > 0.6)
        assert (plan.order, plan.keeps_room) == ((LONG, SHORT), kept)
        assert Plan.of(plan.numbers()).keeps_room is kept
        assert Plan.of(plan.numbers()).picked == plan.picked
    assert not me.plan(20.0, short, [], short=True, long=None).keeps_room
