"""Memory kept for a long request: until the request starts, and never so long that short requests hang."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from laps_core.length import LONG, SHORT, ClassName
from laps_core.policy.memory import HOLD_S, REST, MemoryHold

DRAIN = st.sampled_from([SHORT, LONG])


@given(st.lists(st.tuples(st.floats(1e-3, 1.0), st.booleans(), DRAIN), min_size=1, max_size=300))
def test_memory_hold_takes_bounded_share_of_time(steps: list[tuple[float, bool, ClassName]]) -> None:
    room, now, still, longest = MemoryHold(), 0.0, 0.0, max(step for step, *_ in steps)
    for step, lacking, drain in steps:
        back = room.choose_held_classes(now, lacking=lacking, drains=drain)
        assert back in ((), (LONG,), (LONG, SHORT))
        assert lacking or not back
        now += step
        still += step if back else 0.0
        assert still <= HOLD_S + now / (1.0 + REST) + longest


@given(st.floats(0.0, 100.0), st.floats(1e-3, HOLD_S), DRAIN)
def test_memory_hold_frees_memory_within_bound(stuck_s: float, drain_s: float, drain: ClassName) -> None:
    """Other work frees its memory after `stuck_s`; short batches free theirs `drain_s` after the last was built."""
    room, now, built = MemoryHold(), 0.0, 0.0
    room.choose_held_classes(now, lacking=False, drains=SHORT)
    while now < stuck_s or now < built + drain_s:
        if SHORT not in room.choose_held_classes(now, lacking=True, drains=drain):
            built = now
        now += 0.01
        assert now <= stuck_s + 2.0 * (1.0 + REST) * HOLD_S + drain_s + 0.1


@pytest.mark.parametrize("drain", [SHORT, LONG])
def test_first_memory_hold_spares_short_requests_while_long_drains(drain: ClassName) -> None:
    room, first, both = MemoryHold(), (LONG,) if drain == LONG else (LONG, SHORT), (LONG, SHORT)
    turns = (
        *((100.0, first), (104.9, first), (105.0, ()), (119.9, ())),
        *((120.0, both), (124.9, both), (125.0, ()), (140.0, first)),
    )
    for now, back in turns:
        assert room.choose_held_classes(now, lacking=True, drains=drain) == back


def test_rest_after_memory_hold_lasts_three_times_as_long() -> None:
    room = MemoryHold()
    assert room.choose_held_classes(100.0, lacking=True, drains=SHORT)
    assert not room.choose_held_classes(101.0, lacking=False, drains=SHORT)
    assert not room.choose_held_classes(103.9, lacking=True, drains=SHORT)
    assert room.choose_held_classes(104.0, lacking=True, drains=SHORT)


def test_rest_does_not_count_idle_time_after_memory_hold() -> None:
    room = MemoryHold()
    assert room.choose_held_classes(100.0, lacking=True, drains=SHORT)
    # The prompt started at 101 s, and no other long prompt came for an hour.
    assert not room.choose_held_classes(3700.0, lacking=False, drains=SHORT)
    assert room.choose_held_classes(3700.0 + REST * HOLD_S, lacking=True, drains=SHORT)


def test_memory_hold_lasts_one_round_if_no_work_drains() -> None:
    room = MemoryHold()

    def back(now: float, drains: ClassName | None) -> tuple[ClassName, ...]:
        return room.choose_held_classes(now, lacking=True, drains=drains)

    assert [back(now, None) for now in (0.0, 0.1, 5.0, 10.0)] == [(LONG,), (), (), ()]
    assert back(11.0, SHORT) == (LONG, SHORT)
    assert [back(now, None) for now in (11.1, 11.2)] == [(LONG,), ()]
