"""Gains and harms of a change, recommendation of LAPS, and the highest load of a setup."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, cast

import numpy as np
import pytest
from laps_plan.plan.advice import Trial, advise, gains, harms, laps_beats_stock
from laps_plan.plan.answer import answer, host
from laps_plan.plan.figures import Between, Change, Figures, Sample
from laps_plan.plan.reach import find_highest_load, servers_needed
from laps_plan.plan.setup import LAPS, STOCK, Question, Setup
from laps_plan.plan.trials import Trials, spread
from laps_plan.plan.words import verdict
from laps_plan.profile import Profile
from laps_plan.traffic.given import Traffic, poisson
from laps_plan.traffic.job import Job
from laps_plan.traffic.mixed import by_hand

PROFILE = Profile.load("h200-qwen3-8b")
SURE, UNSURE = 0.02, 0.3
"""Half the widths of a narrow and of a wide confidence interval."""


def change(short: float, long: float, mean: float, off: float = SURE, in_time: float = 0.0) -> Change:
    values = {"short P90": short, "long P90": long, "mean TTFT": mean}
    return Change(
        {name: Between(v, v - off, v + off) for name, v in values.items()}, Between(in_time, in_time, in_time)
    )


def figures(factor: float) -> Figures:
    quantiles = dict.fromkeys(("p50", "p90", "p99"), factor)
    return Figures(100, 0.9, factor, 1.0, quantiles, quantiles)


def test_host_factor_scales_host_times() -> None:
    slower = host(PROFILE, 2.0)
    changed = {
        f.name: getattr(slower, f.name) / getattr(PROFILE, f.name)
        for f in fields(Profile)
        if f.type == "float" and getattr(slower, f.name) != getattr(PROFILE, f.name)
    }
    assert set(changed.values()) == {2.0}
    assert {"launch_s", "slices_launch_s", "front_s"} <= set(changed)


@pytest.mark.parametrize(
    ("found", "gain", "harm", "better"),
    [
        (change(1.0, 1.0, 1.0), False, False, False),
        (change(0.5, 1.2, 0.8), True, True, True),
        (change(0.5, 1.02, 0.8), True, False, True),
        (change(0.8, 1.0, 0.8, UNSURE), False, False, False),
        (change(0.5, 1.6, 0.8), True, True, False),
        (change(0.5, 1.0, 1.1), True, True, False),
        (change(0.5, 1.0, 0.9, in_time=-0.02), True, True, False),
        (change(0.97, 1.0, 0.97), False, False, False),
        (Change({}, None), False, False, False),
    ],
)
def test_change_is_judged_for_gain_harm_and_recommendation(found: Change, gain: bool, harm: bool, better: bool) -> None:
    assert (gains(found), harms(found), laps_beats_stock(found)) == (gain, harm, better)


def test_trial_verdict_distinguishes_gain_trade_and_loss() -> None:
    verdicts = [Trial("x", "1", Setup(LAPS, 8192), change(*values)).verdict for values in
                ((0.7, 1.0, 0.9), (0.7, 1.3, 0.9), (1.0, 1.0, 1.0), (1.3, 1.0, 1.2))]  # fmt: skip
    assert verdicts == ["pays", "a trade", "no difference", "worse"]


def test_change_has_confidence_interval() -> None:
    same = Change.of([figures(0.5)] * 4, [figures(1.0)] * 4).ratios["short P90"]
    assert (same.middle, same.low, same.high) == pytest.approx((0.5, 0.5, 0.5))
    apart = Change.of([figures(0.25), figures(1.0)], [figures(1.0)] * 2).ratios["mean TTFT"]
    assert apart.middle == pytest.approx(0.5)
    assert apart.low < 0.25 < 1.0 < apart.high


def test_missing_class_is_not_compared() -> None:
    one = Figures(10, 1.0, 0.1, 1.0, {"p90": 0.1}, {})
    assert set(Change.of([one] * 3, [one] * 3).ratios) == {"short P90", "mean TTFT"}


def test_setup_is_formatted_as_flags() -> None:
    assert Setup("hrrn", 2048).flags() == "--schedule-policy hrrn --chunked-prefill-size 2048"
    laps = Setup(LAPS, 8192).with_changes(wait_window_ms=0.0, length_threshold="auto", guard=0.5)
    for flag in ("--laps-wait-window-ms 0", "--laps-length-threshold auto", "--laps-config '{\"guard\": 0.5}'"):
        assert flag in laps.flags()


def test_spread_selects_evenly_spaced_parts_of_traffic() -> None:
    jobs = [Job(float(i), 1) for i in range(1000)]
    parts = spread(jobs, 4, 100)
    assert [part[0].at_s for part in parts] == [0.0, 300.0, 600.0, 900.0]
    assert {len(part) for part in parts} == {100}
    assert sum(map(len, spread(jobs, 4, 5000))) == 1000


class CapacityTrials:
    """Trials in which enough requests are in time up to a load per server."""

    capacity = 10.0

    def __init__(self, edge: float, rate: float = 25.0) -> None:
        self.edge = edge
        self.traffic = Traffic([Job(0.0, 1), Job(1.0 / rate, 1)], "x")

    def in_time(self, setup: Setup, load: float, servers: int) -> float:
        return 1.0 if load <= self.edge else 0.5


@pytest.mark.parametrize(("edge", "servers"), [(0.3, 9), (0.55, 5), (0.83, 4), (2.0, 3)])
def test_highest_load_and_server_count_are_found(edge: float, servers: int) -> None:
    trials = cast(Any, CapacityTrials(edge))
    reach = find_highest_load(trials, Setup(LAPS, 8192), 1)
    assert reach.load == pytest.approx(min(edge, 1.0), abs=0.03)
    assert reach.is_lower_bound == (edge > 1.0)
    assert servers_needed(trials, Setup(LAPS, 8192), reach.load) == servers


def make_trials(text: str, requests: int, load: float) -> Trials:
    question = Question(PROFILE, 1, 0.4, 4.0, 8192)
    traffic = poisson(by_hand(text), requests, text)
    return Trials(question, traffic.at_rate(load * Trials(question, traffic).capacity))


def test_laps_is_recommended_for_short_prompts_among_long_prompts() -> None:
    trials = make_trials("90% uniform:16-128, 10% log:2048-8192", 1500, 0.7)
    assert trials.load == pytest.approx(0.7, rel=0.1)
    advice = advise(trials)
    assert advice.recommended
    assert advice.setup.policy == LAPS
    assert set(STOCK) <= set(advice.against)


@pytest.mark.parametrize(("text", "load"), [("100% fixed:64", 0.05), ("95% uniform:16-128, 5% fixed:4096", 0.02)])
def test_laps_is_not_recommended_if_stock_is_as_good(text: str, load: float) -> None:
    advice = advise(make_trials(text, 1200, load))
    assert not advice.recommended
    assert advice.setup.policy in STOCK


class FixedTrials(Trials):
    """Trials with given results: ratio of TTFT to stock's, on the stretches and on the whole traffic."""

    searched, found = 1.0, 1.0

    def stretches(self, setup: Setup, profile: Profile | None = None) -> list[Figures]:
        factor = self.searched if setup.policy == LAPS else 1.0
        return [figures(factor * chance) for chance in (0.9, 1.1, 1.0)]

    def whole(self, setup: Setup) -> Sample:
        at = np.arange(800, dtype=np.float64)
        lone = np.ones(800)
        ttft = (self.found if setup.policy == LAPS else 1.0) * (1.0 + 0.1 * np.sin(at))
        return Sample(at, ttft, np.where(at % 2 == 0, 100.0, 1000.0), lone)

    def in_time(self, setup: Setup, load: float, servers: int) -> float:
        return 1.0


@pytest.mark.parametrize(("searched", "found"), [(1.0, 0.11), (0.11, 1.0), (0.5, 0.5), (1.0, 1.0), (0.2, 1.7)])
def test_verdict_agrees_with_comparison_table(searched: float, found: float) -> None:
    """The verdict does not depend on the stretches on which flags are tried."""
    trials = FixedTrials(Question(PROFILE, 1, 0.4, 4.0, 8192), poisson(by_hand("100% fixed:64"), 600, "x"))
    trials.searched, trials.found = searched, found
    a = answer(trials)
    stock = [side for side in a.sides if side.setup.policy in STOCK]
    assert {side.setup.policy for side in stock} == set(STOCK)
    shown = [side.change for side in stock if side.change is not None]
    assert len(shown) == len(stock)
    assert a.advice.recommended == all(map(laps_beats_stock, shown)) == (found < 0.9)
    said = " ".join(verdict(a))
    assert ("LAPS is recommended" in said) == (found < 0.9)
    best = next(side for side in stock if side.setup == a.advice.stock)
    assert best.change is not None
    assert str(best.change.ratios["short P90"]) in said


def test_parts_of_bursts_hold_same_requests_for_every_policy() -> None:
    at = np.array([0.0] * 40 + [3600.0] * 40)
    new = np.arange(80, dtype=np.float64)
    sample = Sample(at, new, new, np.ones(80))
    backwards = Sample(at[::-1], new[::-1], new[::-1], np.ones(80))
    for one, other in zip(sample.parts(8), backwards.parts(8), strict=True):
        assert len(one.at) == 10
        assert (one.new == other.new).all()


def test_empty_part_does_not_count_as_late() -> None:
    question = Question(PROFILE, 1, 0.4, 4.0, 8192)
    none = Figures.of(Sample(*(np.array([]) for _ in range(4))), question)
    good = figures(1.0)
    found = Change.of([good, good, none], [good, good, none]).in_time
    late = Change.of([none, good, good], [good, good, good]).in_time
    assert found is not None
    assert late is not None
    assert found.middle == late.middle == 0.0
