"""Arrivals that the window expects."""

from __future__ import annotations

import math

import pytest
from laps_core.policy.arrivals import Arrivals, Expected

MS = 1e-3
SERVICE = 10 * MS


def fresh() -> Arrivals:
    return Arrivals(20 * MS, 5 * MS)


def loop(a: Arrivals, cycles: int, users: int, spread: float, at: float = 0.0) -> float:
    """``users`` clients that come back within ``spread`` of each batch and are served together; returns the last
    completion."""
    for _ in range(cycles):
        for i in range(users):
            a.arrived(at + spread * (i + 1) / users)
        a.dispatched(at + spread, users)
        at += spread + SERVICE
        a.completed(at, users)
    return at


def test_a_closed_loop_is_due_back_within_its_usual_spread() -> None:
    a = fresh()
    end = loop(a, 20, 8, 2 * MS)
    due = a.returning(end)
    assert due.requests == pytest.approx(8, rel=0.05)
    assert 2 * MS <= due.by_s - end < 2.5 * MS
    a.arrived(end + 1 * MS, 5)
    assert a.returning(end + 1 * MS).requests == pytest.approx(3, abs=0.4)
    assert a.returning(due.by_s).requests == 0.0


def test_one_sequential_user_is_never_company() -> None:
    a = fresh()
    end = loop(a, 50, 1, 1 * MS)
    a.arrived(end + 1 * MS)
    assert a.returning(end + 1 * MS).requests == 0.0
    assert a.following(end + 1 * MS).requests == 0.0


def test_returns_beyond_the_horizon_are_no_returns() -> None:
    a = fresh()
    end = loop(a, 20, 4, 100 * MS)
    assert a.share < 0.3
    assert a.returning(end).requests < 0.9


def test_times_found_after_the_batch_teach_the_share_but_not_the_spread() -> None:
    a, at = fresh(), 0.0
    for _ in range(30):
        # Two groups of two take turns: each comes back while the other one is served.
        a.dispatched(at, 2)
        a.completed(at + SERVICE, 2)
        a.arrived(at + SERVICE + 0.2 * MS, 2, blind_since=at + 0.1 * MS)
        at += SERVICE + 0.2 * MS
    due = a.returning(at)
    assert due.requests == pytest.approx(2, rel=0.05)
    assert due.by_s == math.inf


def test_a_burst_follows_its_first_request() -> None:
    a, at = fresh(), 0.0
    for n in (7, 7, 1):
        at += 0.5
        a.arrived(at)
        a.arrived(at + 2 * MS, n)
        a.dispatched(at + 2 * MS, n + 1)
        a.completed(at + 12 * MS, n + 1)
    at += 0.5
    a.arrived(at)
    assert a.following(at).requests == pytest.approx(5)
    a.arrived(at + 1 * MS, 2)
    assert a.following(at + 1 * MS).requests == pytest.approx(5), "two came: this is no burst of one"
    assert a.following(at + 10 * MS) == Expected(0.0, at + 10 * MS)


def test_nothing_follows_what_is_in_service_or_long_forgotten() -> None:
    a = fresh()
    for at in (1.0, 2.0):
        a.arrived(at)
        a.arrived(at + 1 * MS, 3)
        a.dispatched(at + 1 * MS, 4)
        assert a.following(at + 1 * MS).requests == 0.0
        a.completed(at + 10 * MS, 4)
    a.arrived(60.0)
    assert a.following(60.0).requests == 0.0


def test_times_may_run_backwards() -> None:
    a = fresh()
    a.arrived(2.0)
    a.dispatched(2.0, 1)
    a.completed(2.01, 1)
    a.arrived(2.005)
    a.arrived(1.0)
    assert a.returning(2.01).requests == 0.0


def test_batches_that_complete_one_behind_the_other_are_due_back_together() -> None:
    a, at = fresh(), 0.0
    for _ in range(30):
        # Three came and left at once, the fourth found them in service and left behind them.
        a.arrived(at, 3)
        a.dispatched(at, 3)
        a.arrived(at + 1 * MS)
        a.dispatched(at + SERVICE, 1)
        a.completed(at + 2 * SERVICE, 3)
        a.completed(at + 2 * SERVICE + 0.5 * MS, 1)
        at += 2 * SERVICE + 3 * MS
    a.arrived(at, 3)
    due = a.returning(at)
    assert due.requests == pytest.approx(1, abs=0.1)
    assert 1 * MS <= due.by_s - at < 2.5 * MS


def test_clients_that_come_back_at_the_very_moment_have_come_back() -> None:
    a = fresh()
    end = loop(a, 20, 4, 0.0)
    a.arrived(end, 4)
    assert a.share == pytest.approx(1.0, abs=0.01)
    assert a.returning(end).requests == 0.0


def test_a_batch_that_starts_when_the_last_one_ends_does_not_run_behind_it() -> None:
    a, at = fresh(), 0.0
    a.arrived(at, 8)
    for _ in range(8):
        a.dispatched(at, 1)
        at += SERVICE
        a.completed(at, 1)
    # Nobody came back: were they taken for one batch, none of them would have been judged by now.
    assert a.share == 0.0
    a.arrived(at)
    a.dispatched(at, 1)
    a.completed(at + SERVICE, 1)
    a.dispatched(at + SERVICE, 0)
    a.completed(at + 2 * SERVICE, 1)
    assert a.share > 0.2


def test_none_that_arrived_change_nothing() -> None:
    a = fresh()
    burst(a, 1.0, 5)
    a.arrived(2.0, 0)
    assert a.following(2.0) == Expected(0.0, 2.0)


def burst(a: Arrivals, at: float, n: int, after: float = 2 * MS) -> None:
    """One request, ``n`` more soon after, all served together."""
    a.arrived(at)
    a.arrived(at + after, n)
    a.dispatched(at + after, n + 1)
    a.completed(at + 10 * MS, n + 1)


def test_a_burst_is_told_by_those_beside_whom_nobody_came() -> None:
    a = fresh()
    for at in (1.0, 2.0, 3.0):
        a.arrived(at)
        a.dispatched(at, 1)
        a.completed(at + 10 * MS, 1)
    burst(a, 4.0, 5)
    a.arrived(5.0)
    assert a.following(5.0) == (5 / 4, pytest.approx(5.0 + 2.1 * MS)), "as late as the one burst, and a little more"


def test_who_comes_at_the_same_time_as_the_first_or_at_the_horizon_follows_it() -> None:
    a = Arrivals(4.0, 0.25)
    a.arrived(1.0)
    a.arrived(1.0, 2)
    a.arrived(1.25, 3)
    a.arrived(1.5, 7)
    a.dispatched(1.5, 13)
    a.completed(1.75, 13)
    a.arrived(2.0)
    assert a.following(2.0).requests == 5.0


def test_who_comes_while_some_wait_and_some_are_served_is_no_first_one() -> None:
    a = fresh()
    a.arrived(1.0)
    a.dispatched(1.0, 1)
    a.arrived(1.001)
    a.arrived(1.002, 5)
    a.dispatched(1.002, 6)
    a.completed(1.01, 7)
    a.arrived(2.0)
    assert a.following(2.0).requests == 6.0


def test_who_comes_while_one_was_left_behind_is_no_first_one() -> None:
    a = fresh()
    burst(a, 1.0, 5)
    a.arrived(2.0, 2)
    a.dispatched(2.0, 1)
    a.completed(2.01, 1)
    a.arrived(2.5)
    assert a.following(2.5) == Expected(0.0, 2.5)


def test_what_is_served_has_no_followers_to_wait_for() -> None:
    a = fresh()
    burst(a, 1.0, 5)
    a.arrived(2.0)
    assert a.following(2.0).requests == 5.0
    a.dispatched(2.0, 1)
    assert a.following(2.0) == Expected(0.0, 2.0)
    a.completed(2.001, 1)
    assert a.following(2.001) == Expected(0.0, 2.001)
    a.arrived(2.001)
    assert a.following(2.001).requests == 2.5, "it came as the batch ended, and so after it"


def test_a_burst_counts_for_five_seconds() -> None:
    a = fresh()
    burst(a, 1.0, 5)
    a.arrived(6.0)
    assert a.following(6.0) == (5.0, pytest.approx(6.0 + 2.1 * MS))
    assert a.following(6.001) == Expected(0.0, 6.001)


def served(a: Arrivals, at: float, n: int = 1, end: float | None = None) -> None:
    """A batch of ``n``, all there at ``at``."""
    a.dispatched(at, n)
    a.completed(at + 0.5 if end is None else end, n)


def test_the_share_is_of_the_batch() -> None:
    a = fresh()
    served(a, 0.0, 4)
    assert a.returning(0.5) == Expected(0.0, math.inf)
    a.arrived(0.501, 2)
    served(a, 1.0)
    served(a, 2.0)
    assert a.share == 0.25 * 2 / 4


def test_no_more_come_back_than_were_served() -> None:
    a = fresh()
    served(a, 0.0)
    a.arrived(0.501)
    a.arrived(0.508)
    served(a, 1.0)
    served(a, 2.0)
    assert a.returning(2.5) == (0.25, pytest.approx(2.5 + 1.05 * MS))


def test_a_return_at_the_horizon_is_one() -> None:
    a = Arrivals(0.25, 0.125)
    served(a, 0.0)
    a.arrived(0.75)
    served(a, 1.0)
    served(a, 2.0)
    assert a.share == 0.25


def test_who_was_not_there_at_first_is_taken_to_come_half_as_late_again() -> None:
    a = fresh()
    served(a, 0.0)
    a.arrived(0.509, blind_since=0.504)
    served(a, 1.0)
    served(a, 2.0)
    assert a.returning(2.5).by_s == pytest.approx(2.5 + 1.5 * 4 * MS * 1.05)


def test_a_batch_that_ran_behind_another_moves_the_time_from_which_lateness_counts() -> None:
    a = fresh()
    a.dispatched(0.0, 1)
    a.dispatched(0.1, 1)
    a.completed(1.0, 1)
    a.arrived(1.0049, blind_since=1.0036)
    a.completed(1.005, 1)
    served(a, 2.0)
    served(a, 3.0)
    assert a.returning(3.5) == (pytest.approx(0.25 / 2), pytest.approx(3.5 + 0.42 * MS)), "5.4 ms, less 5"
