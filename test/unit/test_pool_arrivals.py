"""Arriving work of a server, counted at its arrival."""

from __future__ import annotations

import pytest
from laps_core.histogram import LengthCount
from laps_core.latency.step import Coefficients
from laps_core.pools.arrivals import ENTRIES, Arrivals
from laps_core.protocol import Bucket, Lengths

MODEL = Coefficients(alpha=0.0, linear=1e-3, gamma_r=0.0, per_request=0.0, fixed=0.01)


def test_a_request_is_one_server_for_as_long_as_it_takes() -> None:
    a = Arrivals()
    a.since(0.0)
    a.add(0.0, "long", 3.5)
    assert [a.since(t).long for t in (1.0, 2.0, 3.0, 4.0, 5.0)] == [1.0, 1.0, 1.0, 0.5, 0.0]


def test_two_at_once_are_two_and_brief_ones_count_at_once() -> None:
    a = Arrivals()
    a.since(0.0)
    a.add(0.0, "long", 10.0)
    a.add(1.0, "long", 10.0)
    for _ in range(40):
        a.add(1.0, "short", 0.01)
    assert a.since(2.0) == (pytest.approx(0.2), pytest.approx(1.5))
    assert a.since(2.0) == (pytest.approx(0.2), pytest.approx(1.5)), "no time has passed"


def test_all_that_came_is_counted_whenever_it_is_asked() -> None:
    a = Arrivals()
    a.since(0.0)
    for i in range(2 * ENTRIES):
        a.add(float(i) / 100, "long", 100.0)
    assert a.since(1e4).long * 1e4 == pytest.approx(2 * ENTRIES * 100.0)


@pytest.mark.parametrize("seconds", [float("inf"), 1e308, -1.0])
def test_no_prediction_makes_the_work_infinite_or_less_than_none(seconds: float) -> None:
    a = Arrivals()
    a.since(0.0)
    a.add(0.0, "long", seconds)
    assert 0.0 <= a.since(1.0).long <= 3600.0


def test_what_a_server_has_counted_is_everybodys() -> None:
    a, count = Arrivals(), LengthCount()
    count.add(5000, 0)
    a.add_counts(count.to_lengths(10.0), MODEL, 256)
    assert a.since(10.0) == (0.0, 0.0), "nobody knows when that came"
    for _ in range(50):
        count.add(20, 1000)
    count.add(2000, 0)
    a.add_counts(count.to_lengths(15.0), MODEL, 256)
    assert a.since(15.0) == (pytest.approx(50 * 0.02 / 5.0), 0.0), "an answer later, of all the time since"
    assert a.since(16.0) == (0.0, pytest.approx(1.0))
    assert a.since(18.0) == (0.0, pytest.approx(0.5))


def test_a_server_that_was_started_again_counts_from_nothing() -> None:
    a, count = Arrivals(), LengthCount()
    a.add_counts(count.to_lengths(1000.0), MODEL, 256)
    count.add(5000, 0)
    a.add_counts(count.to_lengths(3.0), MODEL, 256)
    assert a.since(3.0) == (0.0, 0.0)
    count.add(50, 0)
    a.add_counts(count.to_lengths(5.0), MODEL, 256)
    assert a.since(5.0) == (pytest.approx(0.05 / 2), 0.0)


def test_counts_beyond_all_counts_are_bounded() -> None:
    a = Arrivals()
    most = 2**63
    for seconds, n in ((1.0, 0), (2.0, most)):
        buckets = [Bucket(up_to=most, requests=n, new_tokens=n * most, cached_tokens=most)]
        a.add_counts(Lengths(seconds=seconds, buckets=buckets), MODEL, 256)
        a.since(seconds)
    assert 0.0 <= a.since(3.0).long < 1e12
