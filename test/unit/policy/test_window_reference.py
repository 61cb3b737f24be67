"""The waiting window as a state machine, against a plain reference model of Algorithm 1."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from laps_core.config import LapsConfig
from laps_core.policy.hold import SIGMA_S
from laps_core.policy.types import Plan, Waiting
from laps_core.statistics import REASONS
from windows import MS, make_window, predict, short_prompt


def service_s(waiting: list[Waiting], budget: int) -> float:
    """Return the predicted time of a batch of the first waiting requests that fit the budget."""
    batch, left = [waiting[0]], budget - waiting[0].tokens
    for s in waiting[1:]:
        left -= s.tokens
        if left < 0:
            break
        batch.append(s)
    return predict([(s.tokens, 0) for s in batch])


@dataclass
class Reference:
    """Model of the rules that force a dispatch, without expected arrivals."""

    config: LapsConfig

    def forced(self, now: float, waiting: list[Waiting], picked: int, budget: int, held: float | None) -> str | None:
        c = self.config
        if c.wait_window_ms == 0:
            return "idle"
        if picked >= c.wait_max_batch:
            return "depth"
        served = now + service_s(waiting, budget)
        met = [
            s.deadline_s
            for s in waiting
            if s.deadline_s is not None
            and s.deadline_s >= served - (0.0 if held is None else now - max(held, s.since_s))
        ]
        slack = min(met) - served if met else math.inf
        if slack <= SIGMA_S:
            return "slack"
        tokens = sum(s.tokens for s in waiting)
        if picked < len(waiting) or tokens >= budget:
            return "tokens"
        return None


CONFIGS = st.builds(
    LapsConfig,
    window=st.sampled_from(["awd", "awd", "fixed"]),
    wait_window_ms=st.sampled_from([0.0, 2.0, 5.0, 30.0]),
    wait_max_batch=st.integers(1, 12),
)


@dataclass
class Step:
    """Step of the test: time passes, requests arrive, and the window decides if the device is free."""

    passed_ms: float
    tokens: list[int]
    slo_ms: float | None
    long_waits: bool
    gaps_ms: list[float] = field(default_factory=list)


STEPS = st.lists(
    st.builds(
        Step,
        passed_ms=st.sampled_from([0.0, 0.3, 1.0, 2.5, 6.0, 40.0]),
        tokens=st.lists(st.sampled_from([8, 60, 250]), max_size=5),
        slo_ms=st.sampled_from([None, None, 5.0, 12.0, 20.0, 100.0]),
        long_waits=st.sampled_from([False, False, True]),
    ),
    max_size=60,
)


BURSTS = [
    step
    for _ in range(3)
    for step in (
        Step(40.0, [60], None, False),
        Step(1.0, [60] * 3, None, False),
        Step(40.0, [], None, False),
        Step(40.0, [], None, False),
    )
]
"""Steps that teach the window to expect more requests after a first one."""


@settings(max_examples=250, deadline=None)
@given(
    CONFIGS,
    st.tuples(st.sampled_from([[], BURSTS]), STEPS).map(lambda parts: parts[0] + parts[1]),
    st.sampled_from([400, 8192]),
)
def test_window_matches_reference_model(config: LapsConfig, steps: list[Step], budget: int) -> None:
    window, twin, model = make_window(config), make_window(config), Reference(config)
    w_max = config.wait_window_ms * MS
    waiting: list[Waiting] = []
    now, done_at, running, completed = 0.0, 0.0, 0, -math.inf
    held: float | None = None
    for step in steps:
        now += step.passed_ms * MS
        for tokens in step.tokens:
            deadline = None if step.slo_ms is None else now + step.slo_ms * MS
            waiting.append(short_prompt(now, tokens, deadline))
        for each in (window, twin):
            each.record_arrivals(now, len(step.tokens))
        if running and now >= done_at:
            for each in (window, twin):
                each.record_completion(done_at, running)
            running, completed = 0, done_at
        if running:
            continue
        if not waiting:
            for each in (window, twin):
                each.record_empty_queue()
            held = None
            continue
        preempts = step.long_waits
        answers: list[Plan] = [
            each.decide(now, tuple(waiting), token_budget=budget, contended=preempts) for each in (window, twin)
        ]
        answer = answers[0]
        assert answers[1] == answer, "equal inputs, equal outputs"
        served = now + service_s(waiting, budget)
        late = [s.deadline_s is not None and s.deadline_s < served for s in waiting]
        fitting = budget >= sum(s.tokens for s in waiting)
        if answer.held == "window":
            assert not preempts, "while long work waits nothing is held"
            assert model.forced(now, waiting, len(waiting), budget, held) is None
            held = now if held is None else held
            assert fitting
            assert now < answer.account.until_s
            assert answer.account.until_s <= max(held, completed) + w_max + 1e-12
            for s, lost in zip(waiting, late, strict=True):
                if s.deadline_s is not None and not lost:
                    assert answer.account.until_s + served - now <= s.deadline_s + 1e-12, "it could have made it"
            continue
        assert answer.picked[0] == 0, "the head is always taken"
        assert list(answer.picked) == sorted(set(answer.picked)), "in order of arrival"
        total = sum(waiting[i].tokens for i in answer.picked)
        assert len(answer.picked) == len(waiting) if fitting else (total <= budget or len(answer.picked) == 1)
        assert answer.account.late == sum(late[i] for i in answer.picked)
        forced = "preempt" if preempts else model.forced(now, waiting, len(answer.picked), budget, held)
        assert answer.account.reason == forced or (forced is None and answer.account.reason in ("window", "idle"))
        assert answer.account.waited_s == (0.0 if held is None else now - held)
        for each in (window, twin):
            each.record_dispatch(
                now, len(answer.picked), answer.account.waited_s, answer.account.reason, answer.account.late
            )
        said = window.status()
        assert said["window_ms"] * MS == pytest.approx(w_max)
        assert said["depth"] == config.wait_max_batch
        running, done_at = len(answer.picked), now + predict([(waiting[i].tokens, 0) for i in answer.picked])
        waiting = [s for i, s in enumerate(waiting) if i not in set(answer.picked)]
        held = None
    status = json.loads(json.dumps(window.status()))
    assert set(status["dispatched"]) == set(REASONS)
    assert sum(status["waits_ms"].values()) == sum(status["dispatched"].values())
