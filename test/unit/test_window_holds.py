"""Limits of the window, and arrivals that it waits for."""

from __future__ import annotations

import pytest
from laps_core.config import LapsConfig
from laps_core.policy.hold import PAYS, SIGMA_S, Window
from laps_core.policy.types import Plan
from windows import (
    FIXED_S,
    MS,
    TICK,
    TOKEN_S,
    TOLD,
    Predict,
    about,
    ask,
    closed_loop,
    held,
    known_bursts,
    left,
    made,
    predict,
    short,
    taking_turns,
)


def test_the_time_of_recent_batches_is_smoothed() -> None:
    window = made()
    for start, took in ((1.0, 8 * MS), (2.0, 16 * MS), (3.0, 2 * MS)):
        window.record_dispatch(start, 1, 0.0, "idle")
        window.record_completion(start + took, 1)
    assert window.status()["service_ms"] == about(8.0)


def test_it_says_whether_there_are_deadlines() -> None:
    window = made()
    assert ask(window, 1.0, [short(1.0)]) == left((0,), "idle")
    assert window.status()["mode"] == "deadline-free"
    assert ask(window, 1.0, [short(1.0, deadline=2.0)]) == left((0,), "idle")
    assert window.status()["mode"] == "sla"


def test_at_a_limit_it_leaves() -> None:
    config = LapsConfig(window="fixed")
    just = [short(deadline=SIGMA_S)]
    assert ask(made(config), 0.0, just, predict=lambda _: 0.0) == left((0,), "slack")
    assert ask(made(config), 0.0, [short(tokens=300)], token_budget=300) == left((0,), "tokens")
    last = [short(deadline=1.0), short()]
    assert ask(made(config), 1.0, last, predict=lambda _: 0.0) == left((0, 1), "slack")


def test_a_deadline_that_ran_out_during_the_hold_ends_it() -> None:
    """A process that sleeps until the deadline can wake late."""
    window = made(LapsConfig(window="fixed", wait_window_ms=500.0))
    one = [short(deadline=0.1)]
    assert ask(window, 0.0, one, predict=lambda _: 0.0).held == "window"
    assert ask(window, 0.15, one, predict=lambda _: 0.0) == left((0,), "slack", about(0.15), late=1)


def test_one_that_came_too_late_does_not_end_the_hold_of_others() -> None:
    window = made(LapsConfig(window="fixed", wait_window_ms=500.0))
    assert ask(window, 0.0, [short()], predict=lambda _: 0.0).held == "window"
    assert ask(window, 0.1, [short(), short(0.1, deadline=0.05)], predict=lambda _: 0.0).held == "window"


def costly(fixed_s: float) -> Predict:
    return lambda requests: fixed_s + TOKEN_S * sum(new for new, _ in requests)


def test_the_device_idles_for_one_window_at_most() -> None:
    window, now = known_bursts()
    costs = costly(1.0)
    assert ask(window, now, [short(now)], predict=costs) == held(about(now + 10 * MS))
    window.record_completion(now + 18 * MS, 1)  # until then the hold cost nothing
    after = ask(window, now + 28 * MS, [short(now)] * 2, predict=costs)
    assert after == left((0, 1), "window", about(28 * MS))


def test_clients_are_waited_for_where_all_fit_into_the_batch() -> None:
    window, now = closed_loop(4)
    for there, fits in ((1, True), (4, True), (5, False), (7, False)):
        answer = ask(window, now, [short(now)] * there)
        assert answer == held(about(now + PAYS * FIXED_S)) if fits else answer.account.reason == "idle"


def test_clients_are_waited_for_no_longer_than_it_saves_or_a_deadline_allows() -> None:
    window, now = closed_loop(4)
    assert ask(window, now, [short(now)], predict=costly(1.01 * MS / PAYS)).held == "window"
    assert ask(window, now, [short(now)], predict=costly(0.99 * MS / PAYS)) == left((0,), "idle")
    for slack_s, waits in ((1.01 * MS, True), (0.99 * MS, False)):
        due = [short(now, deadline=now + predict([(100, 0)]) + SIGMA_S + slack_s)]
        assert (ask(window, now, due).held == "window") == waits


def test_nothing_is_held_while_no_step_can_be_predicted() -> None:
    window, now = closed_loop(4)
    assert ask(window, now, [short(now)], predict=lambda _: None) == left((0,), "idle")


def test_two_groups_that_take_turns_become_one() -> None:
    window, now = closed_loop(4)
    TOLD.now = predict
    window.record_arrivals(now + 1 * MS, 4)
    window.record_dispatch(now + 1 * MS, 4, 0.0, "idle")
    now, free_s = now + 5 * MS, now + 10 * MS
    waiting = [short(now)] * 3

    def ask_late(window: Window, slack_s: float = 1.0, lead_s: float = 3 * MS) -> Plan:
        due = [short(now, deadline=free_s + predict([(100, 0)] * 3) + slack_s), *waiting[1:]]
        return window.decide(now, due, token_budget=8192, free_s=free_s, lead_s=lead_s)

    assert ask_late(window) == held(about(free_s)), "the others are back 1 ms after that"
    assert ask_late(window, lead_s=FIXED_S - 1 * MS).picked == (0, 1, 2), "the launch would cost as much"
    assert ask_late(window, slack_s=0.5 * MS).picked == (0, 1, 2), "a deadline would be missed"
    assert window.decide(now, waiting, token_budget=8192).picked == (0, 1, 2), "nothing runs"
    five = [short(now)] * 5
    assert window.decide(now, five, token_budget=8192, free_s=free_s).picked == (0, 1, 2, 3, 4), "not all find room"
    off = made(LapsConfig(wait_window_ms=0.0))
    off.record_dispatch(now, 4, 0.0, "idle")
    assert off.decide(now, waiting, token_budget=8192, free_s=free_s).picked == (0, 1, 2)


def test_clients_who_come_at_an_unknown_time_are_waited_for_as_long_as_it_pays() -> None:
    window, now = taking_turns()
    assert ask(window, now, [short(now)] * 2, predict=lambda _: 2 * TICK) == held(about(now + PAYS * 2 * TICK))


@pytest.mark.parametrize(("followed", "waits"), [(5, False), (6, True)])
def test_who_was_followed_more_often_than_it_must_pay_is_waited_with(followed: int, waits: bool) -> None:
    window, now = made(), 1.0
    for i in range(10):
        there = 2 if i < followed else 1
        window.record_arrivals(now)
        window.record_arrivals(now + 2 * MS, there - 1)
        window.record_dispatch(now + 2 * MS, there, 0.0, "idle")
        window.record_completion(now + 12 * MS, there)
        now += 0.2
    window.record_arrivals(now)
    assert ask(window, now, [short(now)]) == (held(about(now + PAYS * FIXED_S)) if waits else left((0,), "idle"))


def test_a_deadline_that_is_far_changes_nothing_of_a_hold() -> None:
    window, now = made(), 1.0
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
    far = ask(window, now, [short(now, deadline=now + 1.0)])
    assert far == ask(window, now, [short(now)])


def test_waits_and_depths_are_counted_by_size() -> None:
    window = made()
    for depth, waited_s in ((1, 0.0), (2, 2 * MS), (3, 3 * MS), (4, 0.06)):
        window.record_dispatch(1.0, depth, waited_s, "idle")
    status = window.status()
    assert {edge: n for edge, n in status["waits_ms"].items() if n} == {"<=0.5": 1, "<=2": 1, "<=5": 1, ">50": 1}
    assert status["depths"] == {"<=1": 1, "<=2": 1, "<=4": 2}


def test_status_is_in_milliseconds() -> None:
    status = made(LapsConfig(wait_window_ms=7.0)).status()
    assert (status["window_ms"], status["window_max_ms"]) == (7.0, 7.0)
