"""The gap between preemptions, and its guarantees for both classes."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from laps_core.policy.fairness import MANY, SAVED, Gap, stretch
from pacers import spend

F = 0.0045


def made(overhead: float, fixed_s: float | None = F) -> Gap:
    sizes: Any = SimpleNamespace(fixed_s=fixed_s)
    return Gap(overhead, sizes)


def ran(gap: Gap, begin: float, end: float) -> None:
    gap.record_launch(begin)
    gap.record_end(begin, end)


def test_the_first_preempts_at_once() -> None:
    assert made(0.15).opens_at() == -math.inf


def test_two_are_as_far_apart_as_the_overhead_allows() -> None:
    gap = made(0.15)
    spend(gap, 1.0)
    ran(gap, 1.0, 1.01)
    assert gap.opens_at() == pytest.approx(1.01 + F / 0.15)
    assert made(0.5).seconds == pytest.approx(2 * F)


@pytest.mark.parametrize(("longs", "times"), [(0, 1), (MANY, 1), (2 * MANY, 2), (MANY**2, MANY), (500, MANY)])
def test_the_more_long_prompts_wait_the_longer_it_is_to_a_bound(longs: int, times: int) -> None:
    gap, least_s = made(0.15), F / 0.15
    spend(gap, 1.0)
    gap.set_paying_longs(longs)
    assert gap.opens_at() == pytest.approx(1.0 + times * least_s)
    assert gap.least_s == pytest.approx(least_s)
    assert gap.opens_for_deadline_at() == pytest.approx(1.0 + F), "to a deadline it is all one"


def test_what_it_grows_by_counts_from_the_begin_of_the_last_batch() -> None:
    least_s = F / 0.15
    for took_s, times in ((0.5 * least_s, 1.5), (1.5 * least_s, 1.0)):
        gap = made(0.15)
        gap.set_paying_longs(2 * MANY)
        spend(gap, 1.0)
        ran(gap, 1.0, 1.0 + took_s)
        assert gap.opens_at() == pytest.approx(1.0 + took_s + times * least_s)


def test_those_not_needed_are_saved_up_one_a_gap() -> None:
    gap, at = made(0.15), 1.0
    g = gap.seconds
    for saved in (SAVED, 2, SAVED):
        for _ in range(saved):
            assert gap.opens_at() <= at
            gap.record_launch(at)
            gap.record_end(at, at)
        assert gap.opens_at() == pytest.approx(at + g)
        at += 2 * g if saved == SAVED else 100 * g


def test_one_that_is_still_on_the_device_keeps_the_next_away() -> None:
    gap = made(0.15)
    spend(gap, 0.0)
    gap.record_launch(0.0)
    assert gap.opens_at() == math.inf
    gap.record_launch(0.0)  # a second batch was launched before the first had ended
    gap.record_end(0.0, 0.1)
    assert gap.opens_at() == math.inf
    gap.record_end(0.1, 0.2)
    assert gap.opens_at() == pytest.approx(0.2 + F / 0.15)


def test_what_is_on_the_device_is_taken_to_end_now_by_whoever_cannot_wait_to_know() -> None:
    gap = made(0.15)
    g = gap.seconds
    assert gap.opens_at(1.0) == gap.opens_at(), "nothing is there"
    gap.record_launch(1.0)
    assert gap.opens_at(1.5) == 1.5, "others are saved up"
    gap.record_end(1.0, 2.0)
    spend(gap, 2.0)
    assert gap.opens_at(2.0) == gap.opens_at() == pytest.approx(2.0 + g)
    gap.record_launch(2.0 + g)
    assert gap.opens_at(2.5) == pytest.approx(2.5 + g)


def test_batches_that_a_deadline_presses_follow_each_other_for_some_gaps() -> None:
    gap = made(0.15)
    g, took, at = gap.seconds, 0.9 * gap.seconds, 1.0
    spend(gap, at)
    for _ in range(4):
        assert gap.opens_for_deadline_at() == pytest.approx(at + F)
        assert gap.opens_at() == pytest.approx(at + g)
        gap.record_launch(at + F)
        gap.record_end(at + F, at + F + took)
        at += F + took
    assert gap.opens_for_deadline_at() == math.inf, "long work has its gap"
    gap.record_launch(at + g)
    assert gap.opens_for_deadline_at() == math.inf, "it is on the device"
    gap.record_end(at + g, at + g + took)
    assert gap.opens_for_deadline_at() == pytest.approx(at + g + took + F), "another run"


def test_while_the_fixed_time_is_not_known_there_is_no_gap() -> None:
    gap = made(0.15, None)
    for _ in range(SAVED + 1):
        ran(gap, 0.0, 0.2)
    assert (gap.seconds, gap.opens_at()) == (0.0, 0.2)


@settings(deadline=None, max_examples=100)
@given(seed=st.integers(0, 1 << 30), overhead=st.floats(0.05, 0.9), share=st.sampled_from([0.0, 0.1, 0.5, 1.0]))
def test_the_long_class_has_its_part_of_any_stretch_of_time(seed: int, overhead: float, share: float) -> None:
    """While short requests always wait, long work gets at least (T - R - P) G / (G + R) of a time T, for any number of
    long prompts. S: longest short batch; P = (SAVED - 1) S; R = S, or SAVED G + S if some batches are urgent."""
    rng, gap, now, log = random.Random(seed), made(overhead), 0.0, []
    for _ in range(200):
        presses = rng.random() < share
        gap.set_paying_longs(rng.choice([1, 1, 7, 100]))
        if now >= gap.opens_at() or (presses and now >= gap.opens_for_deadline_at()):
            took = rng.uniform(0.001, 0.05)
            gap.record_launch(now)
            gap.record_end(now, now + took)
            log.append(("short", now, now + took))
        else:
            took = rng.uniform(0.001, 0.008)  # a slice
            log.append(("long", now, now + took))
        now += took
    widest = max(end - begin for kind, begin, end in log if kind == "short")
    g = gap.least_s
    most = SAVED * g * (share > 0.0) + widest
    assert g / (g + most) == pytest.approx(1.0 / stretch(g, widest, deadlines=share > 0.0))
    for i in range(0, len(log), 17):
        for j in range(i + 1, len(log), 13):
            total = log[j][2] - log[i][1]
            long = sum(end - begin for kind, begin, end in log[i : j + 1] if kind == "long")
            saved = (SAVED - 1) * widest
            assert long >= (total - most - saved) * g / (g + most) - widest - 1e-9


def test_a_run_is_over_once_it_has_lasted_for_its_gaps() -> None:
    for short_of, runs in ((0.001, True), (0.0, False)):
        gap = made(0.5, 0.125)
        spend(gap, 1.0)
        gap.record_launch(1.25)
        gap.record_end(1.25, 1.25 + 0.25 * SAVED - short_of)
        assert (gap.opens_for_deadline_at() < math.inf) == runs
