"""Round interleaving, ratio medians and the verdicts they support."""

from __future__ import annotations

import math
import random

import pytest

from benchmark.results.comparison import interleaved
from benchmark.results.ratio import interval, ratio


def test_turns_alternate_so_that_no_variant_is_always_first() -> None:
    assert list(interleaved("ABC", 3)) == [
        (0, "A"), (0, "B"), (0, "C"), (1, "C"), (1, "B"), (1, "A"), (2, "A"), (2, "B"), (2, "C"),
    ]  # fmt: skip


def test_a_ratio_is_the_median_of_the_rounds_ratios() -> None:
    r = ratio([10.0, 200.0, 30.0], [10.0, 100.0, 20.0])
    assert (r.median, r.low, r.high, r.rounds) == (1.5, 1.0, 2.0, 3)


def test_drift_of_the_machine_cancels() -> None:
    drift = [1.0, 4.0, 0.5, 2.0, 3.0]
    r = ratio([1.1 * d for d in drift], drift)
    assert (r.low, r.high) == (pytest.approx(1.1), pytest.approx(1.1))
    assert r.verdict == "more"


def test_no_verdict_where_the_spread_holds_one_or_the_rounds_are_few() -> None:
    assert ratio([1.2, 1.1, 0.9, 1.3, 1.2], [1.0] * 5).verdict == "not shown"
    assert ratio([1.2, 1.1, 1.3, 1.2], [1.0] * 4).verdict == "not shown"
    assert ratio([1.2, 1.1, 1.3, 1.2, 1.1], [1.0] * 5).verdict == "more"
    assert ratio([0.8, 0.7, 0.9, 0.9, 0.6], [1.0] * 5).verdict == "less"


def test_the_interval_is_all_of_five_rounds_and_less_of_more() -> None:
    assert interval([5, 1, 4, 2, 3]) == (1, 5, 5, 0.9375)
    low, high, n, confidence = interval(range(1, 11))
    assert (low, high, n) == (2, 9, 10)
    assert confidence == pytest.approx(1 - 22 / 1024)


def test_the_interval_covers_the_median_as_often_as_it_says() -> None:
    rng = random.Random(1)
    hits = 0
    for _ in range(2000):
        low, high, _, confidence = interval([rng.lognormvariate(0.0, 1.0) for _ in range(8)])
        hits += low <= 1.0 <= high
    assert hits / 2000 == pytest.approx(confidence, abs=0.02)


def test_nothing_over_nothing_is_one_and_something_over_nothing_has_no_bound() -> None:
    assert ratio([0.0, 1.0, 0.0], [0.0, 0.0, 2.0]).median == 1.0
    assert ratio([1.0], [0.0]).median == math.inf


def test_unequal_rounds_and_none_are_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        ratio([1.0], [1.0, 2.0])
    with pytest.raises(ValueError, match="no "):
        ratio([], [])
