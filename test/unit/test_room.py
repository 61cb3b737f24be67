"""Memory kept for a long request: until it starts, and never so long that short requests hang."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from laps_core.scheduling.room import ROOM_S, Room


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


def test_it_is_kept_by_turns_from_the_first_time_that_it_lacked() -> None:
    room = Room()
    turns = ((100.0, True), (104.9, True), (105.0, False), (109.9, False), (110.0, True), (114.9, True), (115.0, False))
    for now, kept in turns:
        assert room.kept(now, lacking=True) == kept
    assert room.kept(116.0, lacking=False)
    for now, kept in ((117.0, True), (121.9, True), (122.0, False)):
        assert room.kept(now, lacking=True) == kept
