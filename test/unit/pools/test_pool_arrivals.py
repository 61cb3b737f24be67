"""Arriving work of a server, counted at its arrival."""

from __future__ import annotations

import pytest
from laps_core.histogram import LengthCount
from laps_core.latency.step import Coefficients
from laps_core.pools.arrivals import ENTRIES, Arrivals
from laps_core.protocol import Bucket, Lengths

MODEL = Coefficients(alpha=0.0, linear=1e-3, gamma_r=0.0, per_request=0.0, fixed=0.01)


def test_request_counts_as_one_server_for_predicted_time() -> None:
    a = Arrivals()
    a.since(0.0)
    a.add(0.0, "long", 3.5)
    assert [a.since(t).long for t in (1.0, 2.0, 3.0, 4.0, 5.0)] == [1.0, 1.0, 1.0, 0.5, 0.0]


def test_long_requests_add_up_and_short_count_at_arrival() -> None:
    a = Arrivals()
    a.since(0.0)
    a.add(0.0, "long", 10.0)
    a.add(1.0, "long", 10.0)
    for _ in range(40):
        a.add(1.0, "short", 0.01)
    assert a.since(2.0) == (pytest.approx(0.2), pytest.approx(1.5))
    assert a.since(2.0) == (pytest.approx(0.2), pytest.approx(1.5)), "no time has passed"


def test_all_arrivals_count_beyond_entry_limit() -> None:
    a = Arrivals()
    a.since(0.0)
    for i in range(2 * ENTRIES):
        a.add(float(i) / 100, "long", 100.0)
    assert a.since(1e4).long * 1e4 == pytest.approx(2 * ENTRIES * 100.0)


@pytest.mark.parametrize("seconds", [float("inf"), 1e308, -1.0])
def test_extreme_predictions_keep_arriving_work_bounded(seconds: float) -> None:
    a = Arrivals()
    a.since(0.0)
    a.add(0.0, "long", seconds)
    assert 0.0 <= a.since(1.0).long <= 3600.0


def test_server_counts_give_arriving_work_since_last_report() -> None:
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


def test_restarted_server_counts_from_zero() -> None:
    a, count = Arrivals(), LengthCount()
    a.add_counts(count.to_lengths(1000.0), MODEL, 256)
    count.add(5000, 0)
    a.add_counts(count.to_lengths(3.0), MODEL, 256)
    assert a.since(3.0) == (0.0, 0.0)
    count.add(50, 0)
    a.add_counts(count.to_lengths(5.0), MODEL, 256)
    assert a.since(5.0) == (pytest.approx(0.05 / 2), 0.0)


def test_huge_counts_give_bounded_work() -> None:
    a = Arrivals()
    most = 2**63
    for seconds, n in ((1.0, 0), (2.0, most)):
        buckets = [Bucket(up_to=most, requests=n, new_tokens=n * most, cached_tokens=most)]
        a.add_counts(Lengths(seconds=seconds, buckets=buckets), MODEL, 256)
        a.since(seconds)
    assert 0.0 <= a.since(3.0).long < 1e12
