"""Limits of the window, and arrivals that it waits for."""

from __future__ import annotations

import pytest
from laps_core.config import LapsConfig
from laps_core.policy.hold import PAYS, SIGMA_S, Window
from laps_core.policy.types import Plan
from windows import (
    FIXED_S,
    MS,
    PREDICTION,
    TICK,
    TOKEN_S,
    Predict,
    approximate,
    decide,
    hold_plan,
    make_adjustable_window,
    predict,
    release_plan,
    short_prompt,
    window_after_bursts,
    window_after_closed_loop,
    window_after_turns,
)


def test_service_time_of_recent_batches_is_smoothed() -> None:
    window = make_adjustable_window()
    for start, took in ((1.0, 8 * MS), (2.0, 16 * MS), (3.0, 2 * MS)):
        window.record_dispatch(start, 1, 0.0, "idle")
        window.record_completion(start + took, 1)
    assert window.status()["service_ms"] == approximate(8.0)


def test_status_mode_shows_whether_deadlines_exist() -> None:
    window = make_adjustable_window()
    assert decide(window, 1.0, [short_prompt(1.0)]) == release_plan((0,), "idle")
    assert window.status()["mode"] == "deadline-free"
    assert decide(window, 1.0, [short_prompt(1.0, deadline=2.0)]) == release_plan((0,), "idle")
    assert window.status()["mode"] == "sla"


def test_window_dispatches_at_exact_limits() -> None:
    config = LapsConfig(window="fixed")
    just = [short_prompt(deadline=SIGMA_S)]
    assert decide(make_adjustable_window(config), 0.0, just, predict=lambda _: 0.0) == release_plan((0,), "slack")
    assert decide(make_adjustable_window(config), 0.0, [short_prompt(tokens=300)], token_budget=300) == release_plan(
        (0,), "tokens"
    )
    last = [short_prompt(deadline=1.0), short_prompt()]
    assert decide(make_adjustable_window(config), 1.0, last, predict=lambda _: 0.0) == release_plan((0, 1), "slack")


def test_hold_ends_if_deadline_passes_meanwhile() -> None:
    """A process that sleeps until the deadline can wake late."""
    window = make_adjustable_window(LapsConfig(window="fixed", wait_window_ms=500.0))
    one = [short_prompt(deadline=0.1)]
    assert decide(window, 0.0, one, predict=lambda _: 0.0).held == "window"
    assert decide(window, 0.15, one, predict=lambda _: 0.0) == release_plan((0,), "slack", approximate(0.15), late=1)


def test_request_arriving_past_deadline_does_not_end_hold() -> None:
    window = make_adjustable_window(LapsConfig(window="fixed", wait_window_ms=500.0))
    assert decide(window, 0.0, [short_prompt()], predict=lambda _: 0.0).held == "window"
    assert (
        decide(window, 0.1, [short_prompt(), short_prompt(0.1, deadline=0.05)], predict=lambda _: 0.0).held == "window"
    )


def make_prediction(fixed_s: float) -> Predict:
    return lambda requests: fixed_s + TOKEN_S * sum(new for new, _ in requests)


def test_device_idles_for_at_most_one_window() -> None:
    window, now = window_after_bursts()
    costs = make_prediction(1.0)
    assert decide(window, now, [short_prompt(now)], predict=costs) == hold_plan(approximate(now + 10 * MS))
    window.record_completion(now + 18 * MS, 1)  # until then the hold cost nothing
    after = decide(window, now + 28 * MS, [short_prompt(now)] * 2, predict=costs)
    assert after == release_plan((0, 1), "window", approximate(28 * MS))


def test_window_waits_for_clients_only_if_all_fit_batch() -> None:
    window, now = window_after_closed_loop(4)
    for there, fits in ((1, True), (4, True), (5, False), (7, False)):
        answer = decide(window, now, [short_prompt(now)] * there)
        assert answer == hold_plan(approximate(now + PAYS * FIXED_S)) if fits else answer.account.reason == "idle"


def test_hold_is_limited_by_saved_time_and_deadline() -> None:
    window, now = window_after_closed_loop(4)
    assert decide(window, now, [short_prompt(now)], predict=make_prediction(1.01 * MS / PAYS)).held == "window"
    assert decide(window, now, [short_prompt(now)], predict=make_prediction(0.99 * MS / PAYS)) == release_plan(
        (0,), "idle"
    )
    for slack_s, waits in ((1.01 * MS, True), (0.99 * MS, False)):
        due = [short_prompt(now, deadline=now + predict([(100, 0)]) + SIGMA_S + slack_s)]
        assert (decide(window, now, due).held == "window") == waits


def test_nothing_is_held_without_step_prediction() -> None:
    window, now = window_after_closed_loop(4)
    assert decide(window, now, [short_prompt(now)], predict=lambda _: None) == release_plan((0,), "idle")


def test_alternating_client_groups_are_merged() -> None:
    window, now = window_after_closed_loop(4)
    PREDICTION.now = predict
    window.record_arrivals(now + 1 * MS, 4)
    window.record_dispatch(now + 1 * MS, 4, 0.0, "idle")
    now, free_s = now + 5 * MS, now + 10 * MS
    waiting = [short_prompt(now)] * 3

    def ask_late(window: Window, slack_s: float = 1.0, lead_s: float = 3 * MS) -> Plan:
        due = [short_prompt(now, deadline=free_s + predict([(100, 0)] * 3) + slack_s), *waiting[1:]]
        return window.decide(now, due, token_budget=8192, free_s=free_s, lead_s=lead_s)

    assert ask_late(window) == hold_plan(approximate(free_s)), "the others are back 1 ms after that"
    assert ask_late(window, lead_s=FIXED_S - 1 * MS).picked == (0, 1, 2), "the launch would cost as much"
    assert ask_late(window, slack_s=0.5 * MS).picked == (0, 1, 2), "a deadline would be missed"
    assert window.decide(now, waiting, token_budget=8192).picked == (0, 1, 2), "nothing runs"
    five = [short_prompt(now)] * 5
    assert window.decide(now, five, token_budget=8192, free_s=free_s).picked == (0, 1, 2, 3, 4), "not all find room"
    off = make_adjustable_window(LapsConfig(wait_window_ms=0.0))
    off.record_dispatch(now, 4, 0.0, "idle")
    assert off.decide(now, waiting, token_budget=8192, free_s=free_s).picked == (0, 1, 2)


def test_hold_for_unknown_return_time_is_limited_by_saving() -> None:
    window, now = window_after_turns()
    assert decide(window, now, [short_prompt(now)] * 2, predict=lambda _: 2 * TICK) == hold_plan(
        approximate(now + PAYS * 2 * TICK)
    )


@pytest.mark.parametrize(("followed", "waits"), [(5, False), (6, True)])
def test_window_holds_if_most_requests_had_followers(followed: int, waits: bool) -> None:
    window, now = make_adjustable_window(), 1.0
    for i in range(10):
        there = 2 if i < followed else 1
        window.record_arrivals(now)
        window.record_arrivals(now + 2 * MS, there - 1)
        window.record_dispatch(now + 2 * MS, there, 0.0, "idle")
        window.record_completion(now + 12 * MS, there)
        now += 0.2
    window.record_arrivals(now)
    assert decide(window, now, [short_prompt(now)]) == (
        hold_plan(approximate(now + PAYS * FIXED_S)) if waits else release_plan((0,), "idle")
    )


def test_far_deadline_does_not_change_hold() -> None:
    window, now = make_adjustable_window(), 1.0
    for _ in range(4):  # bursts whose clients do not return
        window.record_arrivals(now)
        window.record_arrivals(now + 4.5 * MS, 7)
        window.record_dispatch(now + 4.5 * MS, 8, 0.0, "idle")
        window.record_completion(now + 12 * MS, 8)
        now += 0.2
    for _ in range(6):  # a crowd that returns 1 ms after its batch
        window.record_arrivals(now, 40)
        window.record_dispatch(now, 40, 0.0, "idle")
        window.record_completion(now + 10 * MS, 40)
        now += 11 * MS
    now -= 0.9 * MS
    window.record_arrivals(now)
    far = decide(window, now, [short_prompt(now, deadline=now + 1.0)])
    assert far == decide(window, now, [short_prompt(now)])


def test_status_has_histograms_of_waits_and_depths() -> None:
    window = make_adjustable_window()
    for depth, waited_s in ((1, 0.0), (2, 2 * MS), (3, 3 * MS), (4, 0.06)):
        window.record_dispatch(1.0, depth, waited_s, "idle")
    status = window.status()
    assert {edge: n for edge, n in status["waits_ms"].items() if n} == {"<=0.5": 1, "<=2": 1, "<=5": 1, ">50": 1}
    assert status["depths"] == {"<=1": 1, "<=2": 1, "<=4": 2}


def test_status_is_in_milliseconds() -> None:
    status = make_adjustable_window(LapsConfig(wait_window_ms=7.0)).status()
    assert (status["window_ms"], status["window_max_ms"]) == (7.0, 7.0)
