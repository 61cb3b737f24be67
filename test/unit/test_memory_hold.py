"""Memory kept for a long request: until it starts, and never so long that short requests hang."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from laps_core.length import LONG, SHORT, ClassName
from laps_core.policy.memory import HOLD_S, MemoryHold

DRAIN = st.sampled_from([SHORT, LONG])


@given(st.lists(st.tuples(st.floats(1e-3, 1.0), DRAIN), min_size=1, max_size=300))
def test_others_stand_back_for_half_of_the_time_at_most(steps: list[tuple[float, ClassName]]) -> None:
    room, now, still = MemoryHold(), 0.0, 0.0
    assert not room.stand_back(now, lacking=False, drains=SHORT)
    longest = max(step for step, _ in steps)
    for step, drain in steps:
        back = room.stand_back(now, lacking=True, drains=drain)
        assert back in ((), (LONG,), (LONG, SHORT))
        now += step
        still += step if back else 0.0
        assert still <= now / 2 + (1 + now / HOLD_S) * longest


@given(st.floats(0.0, 100.0), st.floats(1e-3, HOLD_S), DRAIN)
def test_what_drains_in_time_leaves_room_within_its_bound(stuck_s: float, drain_s: float, drain: ClassName) -> None:
    """Other work gives its memory back after `stuck_s`; short batches drain `drain_s` after the last was built."""
    room, now, built = MemoryHold(), 0.0, 0.0
    room.stand_back(now, lacking=False, drains=SHORT)
    while now < stuck_s or now < built + drain_s:
        if SHORT not in room.stand_back(now, lacking=True, drains=drain):
            built = now
        now += 0.01
        assert now <= stuck_s + 4 * HOLD_S + drain_s + 0.1


@pytest.mark.parametrize("drain", [SHORT, LONG])
def test_others_go_on_at_first_and_short_requests_while_long_work_drains(drain: ClassName) -> None:
    room, first = MemoryHold(), (LONG,) if drain == LONG else (LONG, SHORT)
    turns = (
        *((100.0, ()), (104.9, ()), (105.0, first), (109.9, first)),
        *((110.0, ()), (114.9, ()), (115.0, (LONG, SHORT)), (120.0, ()), (125.0, first)),
    )
    for now, back in turns:
        assert room.stand_back(now, lacking=True, drains=drain) == back
    assert not room.stand_back(126.0, lacking=False, drains=SHORT)
    for now, back in ((127.0, ()), (132.0, first)):
        assert room.stand_back(now, lacking=True, drains=drain) == back


def test_where_nothing_gives_memory_back_it_is_tried_once_and_others_go_on() -> None:
    room = MemoryHold()

    def back(now: float, drains: ClassName | None) -> tuple[ClassName, ...]:
        return room.stand_back(now, lacking=True, drains=drains)

    assert [back(now, None) for now in (0.0, 0.1, 5.0, 10.0)] == [(LONG,), (), (), ()]
    assert back(16.0, SHORT) == (LONG, SHORT)
    assert [back(now, None) for now in (16.1, 16.2)] == [(LONG,), ()]
