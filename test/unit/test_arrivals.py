"""What the window expects to arrive."""

from __future__ import annotations

import math

import pytest
from laps_core.scheduling.arrivals import Arrivals, Expected

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


def test_the_rate_fades_in_silence() -> None:
    a = fresh()
    for i in range(2000):
        a.arrived(i * 5 * MS)
    assert a.rate(10.0) == pytest.approx(200, rel=0.05)
    assert a.rate(30.0) < 1.0


def test_times_may_run_backwards() -> None:
    a = fresh()
    a.arrived(2.0)
    a.dispatched(2.0, 1)
    a.completed(2.01, 1)
    a.arrived(2.005)
    a.arrived(1.0)
    assert a.rate(2.01) > 0.0
    assert a.during == 1


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
    assert a.during == 0
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


def test_who_comes_as_a_batch_leaves_came_during_it() -> None:
    a = fresh()
    a.arrived(1.0)
    a.dispatched(1.0, 1)
    a.arrived(1.0, 2)
    assert a.during == 2
