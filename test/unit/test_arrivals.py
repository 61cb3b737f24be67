"""Arrivals that the window expects after an event."""

from __future__ import annotations

import pytest
from laps_core.policy.arrivals import Groups

MS = 1e-3
ROOM = 16


def taught(*groups: tuple[int, int, float]) -> Groups:
    """Return Groups after these groups, a second apart: (size, number that came, delay in seconds)."""
    me = Groups(20 * MS)
    for i, (size, came, late_s) in enumerate(groups):
        me.begin(float(i), size)
        me.add(came, i + late_s, i + late_s)
    return me


def test_the_chance_is_the_share_of_groups_that_were_complete_by_then() -> None:
    me = taught((4, 4, 1 * MS), (4, 4, 2 * MS), (4, 4, 3 * MS), (4, 0, 0.0))
    me.begin(9.0, 4)
    assert [me.chance(9.0, 9.0 + ms * MS, ROOM) for ms in (0.5, 1.5, 2.5, 3.5)] == [0.0, 0.25, 0.5, 0.75]


def test_those_of_which_fewer_came_tell_nothing() -> None:
    me = taught((4, 4, 1 * MS), (4, 1, 1 * MS), (4, 0, 0.0))
    me.begin(9.0, 8)
    assert me.chance(9.0, 9.1, ROOM) == pytest.approx(2 / 3)
    me.add(2, 9.0, 9.0)
    assert me.chance(9.0, 9.1, ROOM) == pytest.approx(1 / 2), "one in four of them has come: so it was with two"
    me.add(4, 9.0, 9.0)
    assert me.chance(9.0, 9.1, ROOM) == 1.0
    me.add(2, 9.0, 9.0)
    assert me.chance(9.0, 9.1, ROOM) == 0.0, "all are there"


def test_one_sequential_user_is_never_company() -> None:
    me = taught(*[(1, 1, 1 * MS)] * 20)
    me.begin(30.0, 1)
    me.add(1, 30.0 + 1 * MS, 30.0 + 1 * MS)
    assert me.chance(30.0 + 1 * MS, 31.0, ROOM) == 0.0


def test_nobody_is_expected_without_an_event_or_long_after_it() -> None:
    assert Groups(20 * MS).chance(5.0, 6.0, ROOM) == 0.0
    me = taught((4, 4, 1 * MS))
    assert me.chance(0.0, 1.0, ROOM) == 0.0, "the first group of all"
    me.begin(9.0, 4)
    assert me.chance(9.0 + 19 * MS, 10.0, ROOM) == 1.0
    assert me.chance(9.0 + 21 * MS, 10.0, ROOM) == 0.0


def test_all_that_may_come_must_find_room() -> None:
    me = taught((4, 4, 1 * MS))
    me.begin(9.0, 4)
    assert [me.chance(9.0, 9.1, room) for room in (3, 4)] == [0.0, 1.0]


def test_who_comes_beyond_the_horizon_does_not_belong_to_the_group() -> None:
    me = Groups(0.25)
    me.begin(1.0, 2)
    me.add(1, 1.25, 1.25)
    me.add(1, 1.5, 1.5)
    me.begin(2.0, 2)
    assert me.chance(2.0, 3.0, ROOM) == 1.0
    me.add(1, 2.0, 2.0)
    assert me.chance(2.0, 3.0, ROOM) == 0.0, "no second one came"


def test_no_more_come_back_than_were_served() -> None:
    me = taught((1, 5, 1 * MS))
    me.begin(9.0, 2)
    me.add(2, 9.0, 9.0)
    assert me.chance(9.0, 9.1, ROOM) == 0.0


def test_who_came_during_a_batch_came_after_the_event_before_it() -> None:
    me = Groups(20 * MS)
    me.begin(1.0, 2)
    me.begin(1.01, 2)
    me.add(2, 1.005, 1.01)
    me.begin(2.0, 2)
    assert me.chance(2.0, 2.1, ROOM) == 0.5


def test_groups_that_were_seen_too_late_tell_nothing() -> None:
    me = Groups(20 * MS)
    for at_s, earliest_s, seen_s in ((1.0, 1 * MS, 1 * MS), (2.0, 8 * MS, 8 * MS), (3.0, 1 * MS, 8 * MS)):
        me.begin(at_s, 2)
        me.add(2, at_s + earliest_s, at_s + seen_s)
    me.begin(9.0, 2)
    assert [me.chance(9.0, 9.0 + ms * MS, ROOM) for ms in (0.5, 4.0, 9.0)] == [0.0, 0.5, 1.0]


def test_where_no_group_tells_anything_it_is_tried() -> None:
    me = Groups(20 * MS)
    me.begin(1.0, 2)
    me.add(2, 1.0, 1.0 + 8 * MS)
    me.begin(9.0, 2)
    assert me.chance(9.0, 9.0 + 4 * MS, ROOM) == 1.0


def test_a_group_that_is_to_come_is_likely_as_those_before_it_but_for_the_last() -> None:
    me = taught((4, 4, 1 * MS), (4, 4, 3 * MS), (4, 0, 0.0))
    assert [me.chance_of_next(2, ms * MS, ROOM) for ms in (0.5, 2.0, 4.0)] == [0.0, 0.5, 1.0]
    assert me.chance_of_next(ROOM + 1, 4 * MS, ROOM) == 0.0
    assert Groups(20 * MS).chance_of_next(2, 4 * MS, ROOM) == 0.0


def test_a_client_that_comes_back_at_the_very_moment_has_come_back() -> None:
    me = taught((2, 2, 0.0))
    me.begin(9.0, 2)
    assert me.chance(9.0, 9.1, ROOM) == 1.0
    me.add(2, 9.0, 9.0)
    assert me.chance(9.0, 9.1, ROOM) == 0.0


def test_times_may_run_backwards() -> None:
    me = taught((2, 2, 1 * MS))
    me.begin(9.0, 2)
    me.add(1, 0.5 * MS - 1.0, 0.5 * MS - 1.0)
    me.add(1, 8.9, 8.9)
    assert me.chance(9.0, 9.1, ROOM) == 1.0
