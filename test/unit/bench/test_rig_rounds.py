"""Round interleaving, ratio medians and the verdicts they support."""

from __future__ import annotations

import math
import random

import pytest

from benchmark.results.comparison import take_turns
from benchmark.results.ratio import interval, ratio


def test_variant_order_alternates_between_rounds() -> None:
    order: list[str] = []

    def once(i: int, name: str) -> str:
        order.append(name)
        return f"{name}{i}"

    found = take_turns("ABC", 3, once, lambda text: None)
    assert "".join(order) == "ABCCBAABC"
    assert found == {name: [f"{name}{i}" for i in range(3)] for name in "ABC"}


def test_ratio_is_median_of_round_ratios() -> None:
    r = ratio([10.0, 200.0, 30.0], [10.0, 100.0, 20.0])
    assert (r.median, r.low, r.high, r.rounds) == (1.5, 1.0, 2.0, 3)


def test_machine_drift_cancels_in_ratio() -> None:
    drift = [1.0, 4.0, 0.5, 2.0, 3.0]
    r = ratio([1.1 * d for d in drift], drift)
    assert (r.low, r.high) == (pytest.approx(1.1), pytest.approx(1.1))
    assert r.verdict == "more"


def test_no_verdict_for_few_rounds_or_interval_around_one() -> None:
    assert ratio([1.2, 1.1, 0.9, 1.3, 1.2], [1.0] * 5).verdict == "not shown"
    assert ratio([1.2, 1.1, 1.3, 1.2], [1.0] * 4).verdict == "not shown"
    assert ratio([1.2, 1.1, 1.3, 1.2, 1.1], [1.0] * 5).verdict == "more"
    assert ratio([0.8, 0.7, 0.9, 0.9, 0.6], [1.0] * 5).verdict == "less"


def test_interval_spans_five_rounds_but_trims_ten() -> None:
    assert interval([5, 1, 4, 2, 3]) == (1, 5, 5, 0.9375)
    low, high, n, confidence = interval(range(1, 11))
    assert (low, high, n) == (2, 9, 10)
    assert confidence == pytest.approx(1 - 22 / 1024)


def test_interval_covers_median_at_stated_confidence() -> None:
    rng = random.Random(1)
    hits = 0
    for _ in range(2000):
        low, high, _, confidence = interval([rng.lognormvariate(0.0, 1.0) for _ in range(8)])
        hits += low <= 1.0 <= high
    assert hits / 2000 == pytest.approx(confidence, abs=0.02)


def test_ratio_with_zero_divisor_is_one_or_infinite() -> None:
    assert ratio([0.0, 1.0, 0.0], [0.0, 0.0, 2.0]).median == 1.0
    assert ratio([1.0], [0.0]).median == math.inf


def test_unequal_or_missing_rounds_are_rejected() -> None:
    with pytest.raises(ValueError, match="zip"):
        ratio([1.0], [1.0, 2.0])
    with pytest.raises(ValueError, match="no "):
        ratio([], [])
