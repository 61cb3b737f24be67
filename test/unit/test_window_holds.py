"""The limits of the window, and what it waits for."""

from __future__ import annotations

import pytest
from laps_core.config import LapsConfig
from laps_core.policy.hold import HEAD_MAX, SIGMA_S
from windows import (
    MS,
    TICK,
    TOKEN_S,
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
        window.dispatched(start, 1, 0.0, "idle")
        window.completed(start + took, 1)
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
    """A process that sleeps until then may wake late."""
    window = made(LapsConfig(window="fixed", wait_window_ms=500.0))
    one = [short(deadline=0.1)]
    assert ask(window, 0.0, one, predict=lambda _: 0.0).held == "window"
    assert ask(window, 0.15, one, predict=lambda _: 0.0) == left((0,), "slack", about(0.15), late=1)


def test_one_that_came_too_late_does_not_end_the_hold_of_others() -> None:
    window = made(LapsConfig(window="fixed", wait_window_ms=500.0))
    assert ask(window, 0.0, [short()], predict=lambda _: 0.0).held == "window"
    assert ask(window, 0.1, [short(), short(0.1, deadline=0.05)], predict=lambda _: 0.0).held == "window"


def test_the_head_of_the_line_is_held_for_so_many_windows_whatever_runs() -> None:
    window, now = known_bursts()
    assert ask(window, now, [short(now)]).held == "window"
    window.completed(now + 18 * MS, 1)  # waiting was free until then
    window.arrived(now + 18 * MS)
    before = ask(window, now + 19.9 * MS, [short(now)] * 2)
    assert before.held == "window" or before.account.reason != "head_of_line"
    after = ask(window, now + HEAD_MAX * 5 * MS, [short(now)] * 2)
    assert after == left((0, 1), "head_of_line", about(20 * MS))


def test_a_wait_of_a_few_microseconds_is_none() -> None:
    window = made(LapsConfig(window="fixed"))
    answer = ask(window, 1.0, [short(1.0, deadline=1.0 + SIGMA_S + 10e-6)], predict=lambda _: 0.0)
    assert answer == left((0,), "idle")


def test_clients_are_waited_for_where_all_fit_into_the_batch() -> None:
    window, now = closed_loop(4)
    for there, fits in ((1, True), (4, True), (5, False), (7, False)):
        answer = ask(window, now, [short(now)] * there)
        assert answer == held(about(now + 1.05 * MS)) if fits else answer.account.reason == "idle"


def costly(fixed_s: float) -> Predict:
    return lambda requests: fixed_s + TOKEN_S * sum(new for new, _ in requests)


def test_clients_are_waited_for_no_longer_than_it_saves_or_a_deadline_allows() -> None:
    window, now = closed_loop(4)
    assert ask(window, now, [short(now)], predict=costly(1.06 * MS)).held == "window"
    assert ask(window, now, [short(now)], predict=costly(1.04 * MS)) == left((0,), "idle")
    for slack_s, waits in ((1.06 * MS, True), (1.04 * MS, False)):
        due = [short(now, deadline=now + predict([(100, 0)]) + SIGMA_S + slack_s)]
        assert (ask(window, now, due).held == "window") == waits


def nothing_known(_: object) -> None:
    return None


@pytest.mark.parametrize(
    ("predict", "saved_s"),
    [
        (lambda _: 2 * TICK, 2 * TICK),
        (lambda _: 4 * TICK, 4 * TICK),
        (lambda _: 9 * TICK, 5 * MS),  # no longer than W_max
        (nothing_known, 3 * TICK),  # half of a recent batch
        (lambda requests: 1.0 if len(requests) == 2 else None, 3 * TICK),
        (lambda requests: 1.0 if len(requests) == 4 else None, 3 * TICK),
    ],
)
def test_clients_who_come_at_an_unknown_time_are_waited_for_as_long_as_it_pays(
    predict: Predict, saved_s: float
) -> None:
    window, now = taking_turns()
    assert ask(window, now, [short(now)] * 2, predict=predict) == held(about(now + saved_s))


def test_the_rest_of_a_burst_is_waited_for_until_the_batch_is_full_if_that_pays() -> None:
    window = made()
    for at in (1.0, 2.0):
        window.arrived(at)
        window.arrived(at + 3 * MS, 15)
        window.dispatched(at + 3 * MS, 16, 0.0, "idle")
        window.completed(at + 12 * MS, 16)
    window.arrived(3.0)
    until = 3.0 + 3.15 * MS * 7 / 15
    # Seven gain what is saved, eight lose the time held.
    assert ask(window, 3.0, [short(3.0)], predict=costly(1.7 * MS)) == held(about(until))
    assert ask(window, 3.0, [short(3.0)], predict=costly(1.6 * MS)) == left((0,), "idle")
    full = ask(window, 3.0, [short(3.0)] * 3, predict=costly(8 * MS))
    assert full == held(about(3.0 + 3.15 * MS * 5 / 15))


def always(seconds: float) -> Predict:
    return lambda _: seconds


def test_a_burst_is_waited_for_if_it_gains_more_than_is_lost() -> None:
    """Seven at an unknown time: seven gain what is saved, eight lose the whole window."""
    config = LapsConfig(wait_window_ms=7e3 * TICK)
    for saved_s, waits in ((8 * TICK, False), (8.25 * TICK, True)):
        window = made(config)
        for at in (1.0, 2.0):
            window.arrived(at)
            window.arrived(at + 4 * TICK, 7, blind_since=at)
            window.dispatched(at + 4 * TICK, 8, 0.0, "idle")
            window.completed(at + 12 * TICK, 8)
        window.arrived(3.0)
        answer = ask(window, 3.0, [short(3.0)], predict=always(saved_s))
        assert answer == (held(3.0 + 7 * TICK) if waits else left((0,), "idle"))


@pytest.mark.parametrize(("followed", "waits"), [(8, False), (9, True)])
def test_who_was_followed_nine_times_in_ten_is_waited_with(followed: int, waits: bool) -> None:
    window, now = made(), 1.0
    for i in range(10):
        there = 2 if i < followed else 1
        window.arrived(now)
        window.arrived(now + 2 * MS, there - 1)
        window.dispatched(now + 2 * MS, there, 0.0, "idle")
        window.completed(now + 12 * MS, there)
        now += 0.2
    window.arrived(now)
    assert ask(window, now, [short(now)]) == (held(about(now + 2.1 * MS)) if waits else left((0,), "idle"))


def test_a_deadline_that_is_far_changes_nothing_of_a_hold() -> None:
    window, now = made(), 1.0
    for _ in range(4):  # bursts, whose clients do not come back
        window.arrived(now)
        window.arrived(now + 4.5 * MS, 7)
        window.dispatched(now + 4.5 * MS, 8, 0.0, "idle")
        window.completed(now + 12 * MS, 8)
        now += 0.2
    for _ in range(6):  # a crowd that comes back 1 ms after its batch
        window.arrived(now, 40)
        window.dispatched(now, 40, 0.0, "idle")
        window.completed(now + 10 * MS, 40)
        now += 11 * MS
    done, now = now - 1 * MS, now - 0.9 * MS
    window.arrived(now)
    until_s = ask(window, now, [short(now, deadline=now + 1.0)]).account.until_s
    assert until_s == ask(window, now, [short(now)]).account.until_s
    assert until_s > done + 1.2 * MS


def test_waits_and_depths_are_counted_by_size() -> None:
    window = made()
    for depth, waited_s in ((1, 0.0), (2, 2 * MS), (3, 3 * MS), (4, 0.06)):
        window.dispatched(1.0, depth, waited_s, "idle")
    status = window.status()
    assert {edge: n for edge, n in status["waits_ms"].items() if n} == {"<=0.5": 1, "<=2": 1, "<=5": 1, ">50": 1}
    assert status["depths"] == {"<=1": 1, "<=2": 1, "<=4": 2}


def test_status_is_in_milliseconds() -> None:
    status = made(LapsConfig(wait_window_ms=7.0)).status()
    assert (status["window_ms"], status["window_max_ms"]) == (7.0, 7.0)
