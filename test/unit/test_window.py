"""The waiting window as a state machine: against a plain reference model, and rule by rule."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from laps_core.config import LapsConfig
from laps_core.scheduling.decision import REASONS, Decision, Dispatch, Wait
from laps_core.scheduling.waiting import Waiting
from laps_core.scheduling.window import HEAD_MAX, SIGMA_S, TOKEN_MAX, Window

MS = 1e-3
FIXED_S, TOKEN_S = 8 * MS, 10e-6


def predict(requests: Sequence[tuple[int, int]]) -> float:
    return FIXED_S + TOKEN_S * sum(new for new, _ in requests)


def short(at: float = 0.0, tokens: int = 100, deadline: float | None = None) -> Waiting:
    return Waiting(tokens, 0, at, deadline)


def service_s(waiting: list[Waiting], budget: int) -> float:
    """Predicted time of one batch of the first of them."""
    batch, left = [waiting[0]], budget - waiting[0].tokens
    for s in waiting[1:]:
        left -= s.tokens
        if left < 0:
            break
        batch.append(s)
    return predict([(s.tokens, 0) for s in batch])


# -- the reference model: Algorithm 1 with nothing but its definitions


@dataclass
class Reference:
    """W and D after each dispatch, and what forces a dispatch. Knows nothing of expected arrivals."""

    config: LapsConfig
    levels: list[int]
    w: float = 0.0
    d: int = 0

    def __post_init__(self) -> None:
        self.w, self.d = self.config.wait_window_ms * MS, max(self.levels)

    def clip(self, w: float) -> float:
        return min(w, self.config.wait_window_ms * MS)

    def after(self, depth: int, tau: float, reason: str) -> None:
        if depth >= self.d:
            if tau > 0:
                self.w = self.clip(2 * tau)
            self.d = next((x for x in self.levels if x > depth), self.levels[-1])
        else:
            if reason == "window":
                self.d = max(1, depth)
            self.w = self.clip(self.w + (self.config.wait_window_ms * MS - self.w) / 8)

    def forced(self, now: float, waiting: list[Waiting], picked: int, budget: int, held: float | None) -> str | None:
        c = self.config
        if c.wait_window_ms == 0:
            return "idle"
        if picked >= (c.wait_max_batch if c.window == "fixed" else self.d):
            return "depth"
        served = now + service_s(waiting, budget)
        met = [s.deadline_s for s in waiting if s.deadline_s is not None and s.deadline_s >= served]
        slack = min(met) - served if met else math.inf
        if slack <= SIGMA_S:
            return "slack"
        tokens = sum(s.tokens for s in waiting)
        if picked < len(waiting) or tokens >= budget or (slack == math.inf and tokens >= TOKEN_MAX):
            return "tokens"
        if held is not None and now - held >= HEAD_MAX * c.wait_window_ms * MS:
            return "head_of_line"
        return None


CONFIGS = st.builds(
    LapsConfig,
    window=st.sampled_from(["awd", "awd", "fixed"]),
    wait_window_ms=st.sampled_from([0.0, 2.0, 5.0, 30.0]),
    wait_max_batch=st.integers(1, 12),
)


@dataclass
class Step:
    """Time passes, requests arrive, and the window is asked if the device is free."""

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
"""Teaches the window that company follows a first request."""


@settings(max_examples=250, deadline=None)
@given(
    CONFIGS,
    st.tuples(st.sampled_from([[], BURSTS]), STEPS).map(lambda parts: parts[0] + parts[1]),
    st.sampled_from([(), (2, 6), (1, 4, 64)]),
    st.sampled_from([400, 8192]),
)
def test_follows_the_reference_and_never_waits_wrongly(
    config: LapsConfig, steps: list[Step], depths: tuple[int, ...], budget: int
) -> None:
    powers = [1 << i for i in range(10)]
    levels = sorted({d for d in (depths or powers) if d <= config.wait_max_batch} | {config.wait_max_batch})
    window, twin, model = Window(config, depths), Window(config, depths), Reference(config, levels)
    w_max = config.wait_window_ms * MS
    waiting: list[Waiting] = []
    now, done_at, running, completed = 0.0, 0.0, 0, -math.inf
    held: float | None = None
    for step in steps:
        now += step.passed_ms * MS
        for tokens in step.tokens:
            deadline = None if step.slo_ms is None else now + step.slo_ms * MS
            waiting.append(short(now, tokens, deadline))
        for each in (window, twin):
            each.arrived(now, len(step.tokens))
        if running and now >= done_at:
            for each in (window, twin):
                each.completed(done_at, running)
            running, completed = 0, done_at
        if running:
            continue
        preempts = step.long_waits and bool(waiting)
        answers: list[Decision] = [
            (each.leave if preempts else each.decide)(now, tuple(waiting), token_budget=budget, predict=predict)
            for each in (window, twin)
        ]
        answer = answers[0]
        assert answers[1] == answer, "equal inputs, equal outputs"
        if not waiting:
            assert answer == Wait(math.inf, "empty")
            held = None
            continue
        served = now + service_s(waiting, budget)
        late = [s.deadline_s is not None and s.deadline_s < served for s in waiting]
        fitting = budget >= sum(s.tokens for s in waiting)
        if isinstance(answer, Wait):
            assert not preempts, "while long work waits nothing is held"
            assert model.forced(now, waiting, len(waiting), budget, held) is None
            held = now if held is None else held
            assert fitting
            assert now < answer.until_s
            assert answer.until_s <= held + HEAD_MAX * w_max + 1e-12
            assert answer.until_s <= max(held, completed) + w_max + 1e-12
            for s, lost in zip(waiting, late, strict=True):
                if s.deadline_s is not None and not lost:
                    assert answer.until_s + served - now <= s.deadline_s + 1e-12, "it could have made it"
            continue
        assert len(set(answer.picked)) == len(answer.picked)
        assert late[answer.picked[0]] <= min(late), "late ones last"
        assert answer.picked[0] == late.index(min(late)), "the head is always taken"
        total = sum(waiting[i].tokens for i in answer.picked)
        assert len(answer.picked) == len(waiting) if fitting else (total <= budget or len(answer.picked) == 1)
        assert answer.late == sum(late[i] for i in answer.picked)
        forced = "preempt" if preempts else model.forced(now, waiting, len(answer.picked), budget, held)
        assert answer.reason == forced or (forced is None and answer.reason in ("window", "idle"))
        tau = 0.0 if held is None else now - max(held, completed)
        assert answer.waited_s == (0.0 if held is None else now - held)
        for each in (window, twin):
            each.dispatched(now, len(answer.picked), answer.waited_s, answer.reason, answer.late)
        model.after(len(answer.picked), tau, answer.reason)
        assert window.depth == model.d
        assert window.window_s == pytest.approx(model.w)
        assert 0.0 <= window.window_s <= w_max or w_max == 0.0
        assert 1 <= window.depth <= config.wait_max_batch
        running, done_at = len(answer.picked), now + predict([(waiting[i].tokens, 0) for i in answer.picked])
        waiting = [s for i, s in enumerate(waiting) if i not in set(answer.picked)]
        held = None
    status = json.loads(json.dumps(window.status()))
    assert set(status["dispatched"]) == set(REASONS)
    assert sum(status["waits_ms"].values()) == sum(status["dispatched"].values())


# -- rule by rule


def ask(window: Window, now: float, shorts: list[Waiting], **more: object) -> Decision:
    given: dict[str, object] = {"token_budget": 8192, "predict": predict} | more
    return window.decide(now, shorts, **given)  # type: ignore[arg-type]


def serve(window: Window, at: float, times: list[float]) -> tuple[float, list[int]]:
    """Play requests that arrive at ``times`` from ``at`` on, polled as they come; returns the end and the depths."""
    pending = sorted(at + t for t in times)
    waiting: list[Waiting] = []
    now, depths = at, []
    while pending or waiting:
        now = max(now, pending[0]) if not waiting else now
        while pending and pending[0] <= now:
            window.arrived(pending[0])
            waiting.append(short(pending.pop(0)))
        answer = ask(window, now, waiting)
        if isinstance(answer, Wait):
            now = min([answer.until_s, *pending[:1]])
            continue
        window.dispatched(now, len(answer.picked), answer.waited_s, answer.reason)
        depths.append(len(answer.picked))
        now += predict([(waiting[i].tokens, 0) for i in answer.picked])
        window.completed(now, len(answer.picked))
        waiting = [s for i, s in enumerate(waiting) if i not in set(answer.picked)]
    return now, depths


BURST = [0.4 * MS * i for i in range(8)]


def test_a_burst_leaves_as_one_batch_once_bursts_are_known() -> None:
    window, now, seen = Window(LapsConfig()), 0.0, []
    for _ in range(4):
        now, depths = serve(window, now + 0.2, BURST)
        seen.append(depths)
    assert seen[0][0] == 1, "nothing is known yet"
    assert seen[1:] == [[8]] * 3


def test_lone_requests_are_not_held_even_at_a_high_rate() -> None:
    window, now = Window(LapsConfig()), 0.0
    for gap in [0.1 * MS, 1 * MS, 30 * MS] * 50:
        now += gap
        window.arrived(now)
        answer = ask(window, now, [short(now)])
        assert answer == Dispatch((0,), "idle")
        window.dispatched(now, 1, 0.0, "idle")
        now += 1 * MS
        window.completed(now, 1)


def test_bursts_are_forgotten_in_silence() -> None:
    window, now = Window(LapsConfig()), 0.0
    for _ in range(3):
        now, _ = serve(window, now + 0.2, BURST)
    assert serve(window, now + 60.0, BURST)[1][0] == 1


def known_bursts(config: LapsConfig, at: float = 1.0) -> tuple[Window, float]:
    """A window that expects seven more requests within 3 ms of a first one, which arrives now."""
    window, now = Window(config), at
    for _ in range(3):
        now, _ = serve(window, now + 0.2, BURST)
    now += 0.2
    window.arrived(now)
    return window, now


def test_waits_for_a_known_burst_and_leaves_when_it_is_full() -> None:
    window, now = known_bursts(LapsConfig())
    answer = ask(window, now, [short(now)])
    assert isinstance(answer, Wait)
    assert answer.reason == "burst"
    assert 2 * MS < answer.until_s - now < 5 * MS
    window.arrived(now + 1 * MS, 7)
    full = ask(window, now + 1 * MS, [short(now)] * 8)
    assert full == Dispatch(tuple(range(8)), "depth", pytest.approx(1 * MS))


def test_leaves_at_the_end_when_the_burst_does_not_come() -> None:
    window, now = known_bursts(LapsConfig())
    answer = ask(window, now, [short(now)])
    assert isinstance(answer, Wait)
    after = ask(window, answer.until_s, [short(now)])
    assert isinstance(after, Dispatch)
    assert after.reason in ("idle", "window")


def test_holds_that_do_not_pay_are_given_up() -> None:
    window, now = known_bursts(LapsConfig())
    held = 0
    for _ in range(40):
        answer = ask(window, now, [short(now)])
        start = now
        if isinstance(answer, Wait):
            held += 1
            now = answer.until_s
            answer = ask(window, now, [short(start)])
        assert isinstance(answer, Dispatch)
        window.dispatched(now, 1, answer.waited_s, answer.reason)
        now += 9 * MS
        window.completed(now, 1)
        now += 50 * MS
        window.arrived(now)
    assert held <= 6


def test_a_tight_deadline_is_not_waited_away() -> None:
    window, now = known_bursts(LapsConfig())
    service = predict([(100, 0)])
    assert ask(window, now, [short(now, deadline=now + service + 1.9 * MS)]) == Dispatch((0,), "slack")
    answer = ask(window, now, [short(now, deadline=now + service + 5 * MS)])
    assert answer.until_s <= now + 3 * MS if isinstance(answer, Wait) else answer.reason == "idle"
    assert window.status()["mode"] == "sla"


def test_who_can_make_it_goes_first_and_late_ones_are_counted_not_dropped() -> None:
    window = Window(LapsConfig(wait_window_ms=0.0))
    shorts = [short(0, deadline=-1.0), short(0, deadline=9.0), short(0), short(0, deadline=0.001)]
    answer = ask(window, 0.0, shorts)
    assert isinstance(answer, Dispatch)
    assert answer.picked == (1, 2, 0, 3)
    assert answer.late == 2
    window.dispatched(0.0, 4, 0.0, answer.reason, answer.late)
    assert window.status()["late"] == 2


def test_a_batch_that_preempts_takes_all_that_is_there_and_is_not_held() -> None:
    window, now = known_bursts(LapsConfig())
    assert isinstance(ask(window, now, [short(now)]), Wait)
    later = now + 1 * MS
    answer = window.leave(later, [short(now), short(later, deadline=now)], token_budget=8192, predict=predict)
    assert answer == Dispatch((0, 1), "preempt", pytest.approx(1 * MS), late=1)


def test_window_zero_is_the_dual_queue_only() -> None:
    window = Window(LapsConfig(wait_window_ms=0.0))
    assert serve(window, 0.0, BURST)[1][0] == 1
    assert window.status()["mode"] == "off"


def test_fixed_window_waits_from_the_first_arrival() -> None:
    window = Window(LapsConfig(window="fixed"))
    assert ask(window, 1.0, [short(0.998), short(0.999)]) == Wait(0.998 + 5 * MS, "fixed")
    assert ask(window, 1.003, [short(0.998)]) == Dispatch((0,), "window", pytest.approx(3 * MS))
    assert ask(window, 1.0, [short(1.0)] * 8) == Dispatch(tuple(range(8)), "depth")
    # A timer that wakes its sleeper a few microseconds early has ended the window all the same.
    assert isinstance(early := ask(window, 1.002_990, [short(0.998)]), Dispatch)
    assert early.reason == "window"


def test_a_fixed_window_does_not_wait_a_deadline_away() -> None:
    window = Window(LapsConfig(window="fixed", wait_window_ms=30.0))
    answer = ask(window, 0.0, [short(0.0, deadline=predict([(100, 0)]) + 6 * MS)])
    assert answer == Wait(pytest.approx(4 * MS), "fixed")


def test_depth_shrinks_to_a_short_fill_and_grows_back_by_levels() -> None:
    window, depths = Window(LapsConfig()), []
    for depth, reason in [(3, "window"), (2, "idle"), (3, "depth"), (4, "depth"), (8, "depth"), (1, "window")]:
        window.dispatched(0.0, depth, 0.0, reason)
        depths.append(window.depth)
    assert depths == [3, 3, 4, 8, 8, 1]


def test_token_max_sends_a_heavy_batch_without_deadlines() -> None:
    window, now = known_bursts(LapsConfig())
    assert ask(window, now, [short(now, TOKEN_MAX // 2)] * 2) == Dispatch((0, 1), "tokens")
    answer = ask(window, now, [short(now, TOKEN_MAX // 2, now + 1.0)] * 2)
    assert isinstance(answer, Wait), "M_s is a rule of the deadline-free mode"


def test_over_budget_those_that_fit_go_in_their_order() -> None:
    shorts = [short(tokens=60), short(tokens=200), short(tokens=50), short(tokens=30)]
    assert ask(Window(LapsConfig()), 0.0, shorts, token_budget=300) == Dispatch((0, 1, 3), "tokens")
    assert ask(Window(LapsConfig()), 0.0, [short(tokens=500)], token_budget=150) == Dispatch((0,), "tokens")


def test_depths_come_from_captured_graphs_below_the_cap() -> None:
    assert Window(LapsConfig(wait_max_batch=8), depths=(1, 2, 4, 64)).depth == 8
    assert Window(LapsConfig(wait_max_batch=1)).depth == 1


def test_aborts_leave_no_ghosts() -> None:
    window, now = known_bursts(LapsConfig())
    assert isinstance(ask(window, now, [short(now)]), Wait)
    assert ask(window, now + 1 * MS, []) == Wait(math.inf, "empty")
    answer = ask(window, now + 30 * MS, [short(now + 30 * MS)])
    assert isinstance(answer, Dispatch)
    assert answer.waited_s == 0.0


def test_behind_a_backlog_the_first_requests_are_not_late() -> None:
    window = Window(LapsConfig())
    batch_s = predict([(100, 0)] * 10)
    # Ten fit one batch and can make it; all two hundred in one step could not.
    shorts = [short(deadline=batch_s + 5 * MS) for _ in range(200)]
    answer = window.decide(0.0, shorts, token_budget=1000, predict=predict)
    assert isinstance(answer, Dispatch)
    assert answer.picked == tuple(range(10))
    assert answer.late == 0
