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
from pacers import use_up_preemptions

F = 0.0045


def make_gap(overhead: float, fixed_s: float | None = F) -> Gap:
    sizes: Any = SimpleNamespace(fixed_s=fixed_s)
    return Gap(overhead, sizes)


def record_batch(gap: Gap, begin: float, end: float) -> None:
    gap.record_launch(begin)
    gap.record_end(begin, end)


def test_first_batch_may_preempt_at_once() -> None:
    assert make_gap(0.15).opens_at() == -math.inf


def test_preemptions_keep_gap_set_by_overhead() -> None:
    gap = make_gap(0.15)
    use_up_preemptions(gap, 1.0)
    record_batch(gap, 1.0, 1.01)
    assert gap.opens_at() == pytest.approx(1.01 + F / 0.15)
    assert make_gap(0.5).seconds == pytest.approx(2 * F)


@pytest.mark.parametrize(("longs", "times"), [(0, 1), (MANY, 1), (2 * MANY, 2), (MANY**2, MANY), (500, MANY)])
def test_gap_grows_with_waiting_long_prompts_up_to_bound(longs: int, times: int) -> None:
    gap, least_s = make_gap(0.15), F / 0.15
    use_up_preemptions(gap, 1.0)
    gap.set_paying_longs(longs)
    assert gap.opens_at() == pytest.approx(1.0 + times * least_s)
    assert gap.least_s == pytest.approx(least_s)
    assert gap.opens_for_deadline_at() == pytest.approx(1.0 + F), "to a deadline it is all one"


def test_gap_growth_counts_from_start_of_last_batch() -> None:
    least_s = F / 0.15
    for took_s, times in ((0.5 * least_s, 1.5), (1.5 * least_s, 1.0)):
        gap = make_gap(0.15)
        gap.set_paying_longs(2 * MANY)
        use_up_preemptions(gap, 1.0)
        record_batch(gap, 1.0, 1.0 + took_s)
        assert gap.opens_at() == pytest.approx(1.0 + took_s + times * least_s)


def test_unused_preemptions_are_saved_one_per_gap() -> None:
    gap, at = make_gap(0.15), 1.0
    g = gap.seconds
    for saved in (SAVED, 2, SAVED):
        for _ in range(saved):
            assert gap.opens_at() <= at
            gap.record_launch(at)
            gap.record_end(at, at)
        assert gap.opens_at() == pytest.approx(at + g)
        at += 2 * g if saved == SAVED else 100 * g


def test_running_preempting_batch_blocks_next_one() -> None:
    gap = make_gap(0.15)
    use_up_preemptions(gap, 0.0)
    gap.record_launch(0.0)
    assert gap.opens_at() == math.inf
    gap.record_launch(0.0)  # a second batch was launched before the first had ended
    gap.record_end(0.0, 0.1)
    assert gap.opens_at() == math.inf
    gap.record_end(0.1, 0.2)
    assert gap.opens_at() == pytest.approx(0.2 + F / 0.15)


def test_opens_at_uses_assumed_end_of_running_batch() -> None:
    gap = make_gap(0.15)
    g = gap.seconds
    assert gap.opens_at(1.0) == gap.opens_at(), "nothing is there"
    gap.record_launch(1.0)
    assert gap.opens_at(1.5) == 1.5, "others are saved up"
    gap.record_end(1.0, 2.0)
    use_up_preemptions(gap, 2.0)
    assert gap.opens_at(2.0) == gap.opens_at() == pytest.approx(2.0 + g)
    gap.record_launch(2.0 + g)
    assert gap.opens_at(2.5) == pytest.approx(2.5 + g)


def test_urgent_batches_run_closely_for_limited_number_of_gaps() -> None:
    gap = make_gap(0.15)
    g, took, at = gap.seconds, 0.9 * gap.seconds, 1.0
    use_up_preemptions(gap, at)
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


def test_no_gap_while_fixed_time_is_unknown() -> None:
    gap = make_gap(0.15, None)
    for _ in range(SAVED + 1):
        record_batch(gap, 0.0, 0.2)
    assert (gap.seconds, gap.opens_at()) == (0.0, 0.2)


@settings(deadline=None, max_examples=100)
@given(seed=st.integers(0, 1 << 30), overhead=st.floats(0.05, 0.9), share=st.sampled_from([0.0, 0.1, 0.5, 1.0]))
def test_long_class_gets_guaranteed_share_of_any_interval(seed: int, overhead: float, share: float) -> None:
    """While short requests always wait, long work gets at least (T - R - P) G / (G + R) of a time T, for any number of
    long prompts. S: longest short batch; P = (SAVED - 1) S; R = S, or SAVED G + S if some batches are urgent."""
    rng, gap, now, log = random.Random(seed), make_gap(overhead), 0.0, []
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


def test_urgent_run_ends_after_saved_gaps() -> None:
    for short_of, runs in ((0.001, True), (0.0, False)):
        gap = make_gap(0.5, 0.125)
        use_up_preemptions(gap, 1.0)
        gap.record_launch(1.25)
        gap.record_end(1.25, 1.25 + 0.25 * SAVED - short_of)
        assert (gap.opens_for_deadline_at() < math.inf) == runs
