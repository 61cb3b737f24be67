"""Arrivals that the window expects after an event."""

from __future__ import annotations

import math

import pytest
from laps_core.policy.arrivals import Groups, Rate

MS = 1e-3
ROOM = 16


def make_groups(*groups: tuple[int, int, float]) -> Groups:
    """Return Groups after these groups, a second apart: (size, number that came, delay in seconds)."""
    me = Groups(20 * MS)
    for i, (size, came, late_s) in enumerate(groups):
        me.begin(float(i), size)
        me.add(came, i + late_s, i + late_s)
    return me


def test_chance_is_share_of_earlier_groups_complete_in_time() -> None:
    groups = make_groups((4, 4, 1 * MS), (4, 4, 2 * MS), (4, 4, 3 * MS), (4, 0, 0.0))
    groups.begin(9.0, 4)
    assert [groups.chance(9.0, 9.0 + ms * MS, ROOM) for ms in (0.5, 1.5, 2.5, 3.5)] == [0.0, 0.25, 0.5, 0.75]


def test_groups_with_fewer_arrivals_are_not_compared() -> None:
    groups = make_groups((4, 4, 1 * MS), (4, 1, 1 * MS), (4, 0, 0.0))
    groups.begin(9.0, 8)
    assert groups.chance(9.0, 9.1, ROOM) == pytest.approx(2 / 3)
    groups.add(2, 9.0, 9.0)
    assert groups.chance(9.0, 9.1, ROOM) == pytest.approx(1 / 2), "one in four of them has come: so it was with two"
    groups.add(4, 9.0, 9.0)
    assert groups.chance(9.0, 9.1, ROOM) == 1.0
    groups.add(2, 9.0, 9.0)
    assert groups.chance(9.0, 9.1, ROOM) == 0.0, "all are there"


def test_chance_is_zero_once_single_user_is_back() -> None:
    groups = make_groups(*[(1, 1, 1 * MS)] * 20)
    groups.begin(30.0, 1)
    groups.add(1, 30.0 + 1 * MS, 30.0 + 1 * MS)
    assert groups.chance(30.0 + 1 * MS, 31.0, ROOM) == 0.0


def test_chance_is_zero_without_event_or_after_horizon() -> None:
    assert Groups(20 * MS).chance(5.0, 6.0, ROOM) == 0.0
    groups = make_groups((4, 4, 1 * MS))
    assert groups.chance(0.0, 1.0, ROOM) == 0.0, "the first group of all"
    groups.begin(9.0, 4)
    assert groups.chance(9.0 + 19 * MS, 10.0, ROOM) == 1.0
    assert groups.chance(9.0 + 21 * MS, 10.0, ROOM) == 0.0


def test_chance_is_zero_if_rest_of_group_exceeds_capacity() -> None:
    groups = make_groups((4, 4, 1 * MS))
    groups.begin(9.0, 4)
    assert [groups.chance(9.0, 9.1, room) for room in (3, 4)] == [0.0, 1.0]


def test_arrivals_after_horizon_do_not_belong_to_group() -> None:
    groups = Groups(0.25)
    groups.begin(1.0, 2)
    groups.add(1, 1.25, 1.25)
    groups.add(1, 1.5, 1.5)
    groups.begin(2.0, 2)
    assert groups.chance(2.0, 3.0, ROOM) == 1.0
    groups.add(1, 2.0, 2.0)
    assert groups.chance(2.0, 3.0, ROOM) == 0.0, "no second one came"


def test_group_arrivals_are_limited_to_group_size() -> None:
    groups = make_groups((1, 5, 1 * MS))
    groups.begin(9.0, 2)
    groups.add(2, 9.0, 9.0)
    assert groups.chance(9.0, 9.1, ROOM) == 0.0


def test_arrivals_during_batch_count_for_previous_event() -> None:
    groups = Groups(20 * MS)
    groups.begin(1.0, 2)
    groups.begin(1.01, 2)
    groups.add(2, 1.005, 1.01)
    groups.begin(2.0, 2)
    assert groups.chance(2.0, 2.1, ROOM) == 0.5


def test_groups_with_uncertain_arrival_time_do_not_count() -> None:
    groups = Groups(20 * MS)
    for at_s, earliest_s, seen_s in ((1.0, 1 * MS, 1 * MS), (2.0, 8 * MS, 8 * MS), (3.0, 1 * MS, 8 * MS)):
        groups.begin(at_s, 2)
        groups.add(2, at_s + earliest_s, at_s + seen_s)
    groups.begin(9.0, 2)
    assert [groups.chance(9.0, 9.0 + ms * MS, ROOM) for ms in (0.5, 4.0, 9.0)] == [0.0, 0.5, 1.0]


def test_chance_is_one_if_no_comparable_group_counts() -> None:
    groups = Groups(20 * MS)
    groups.begin(1.0, 2)
    groups.add(2, 1.0, 1.0 + 8 * MS)
    groups.begin(9.0, 2)
    assert groups.chance(9.0, 9.0 + 4 * MS, ROOM) == 1.0


def test_chance_of_next_ignores_last_group() -> None:
    groups = make_groups((4, 4, 1 * MS), (4, 4, 3 * MS), (4, 0, 0.0))
    assert [groups.chance_of_next(2, ms * MS, ROOM) for ms in (0.5, 2.0, 4.0)] == [0.0, 0.5, 1.0]
    assert groups.chance_of_next(ROOM + 1, 4 * MS, ROOM) == 0.0
    assert Groups(20 * MS).chance_of_next(2, 4 * MS, ROOM) == 0.0


def test_client_returning_at_event_time_counts_for_that_event() -> None:
    groups = make_groups((2, 2, 0.0))
    groups.begin(9.0, 2)
    assert groups.chance(9.0, 9.1, ROOM) == 1.0
    groups.add(2, 9.0, 9.0)
    assert groups.chance(9.0, 9.1, ROOM) == 0.0


def test_arrivals_with_earlier_timestamps_do_not_change_chance() -> None:
    groups = make_groups((2, 2, 1 * MS))
    groups.begin(9.0, 2)
    groups.add(1, 0.5 * MS - 1.0, 0.5 * MS - 1.0)
    groups.add(1, 8.9, 8.9)
    assert groups.chance(9.0, 9.1, ROOM) == 1.0


def test_rate_counts_latest_arrivals() -> None:
    rate = Rate()
    assert math.isinf(rate.per_s(1.0))
    rate.record(10.0, 0)
    assert math.isinf(rate.per_s(10.0))
    assert rate.per_s(12.0) == 0.0
    rate.record(12.0, 3)
    assert rate.per_s(14.0) == pytest.approx(3 / 4)
    for i in range(100):
        rate.record(20.0 + i, 1)
    assert rate.per_s(119.0) == pytest.approx(1.0)
    assert rate.per_s(1119.0) < 0.05
