"""The limits of the window, what it waits for, and what it learns from that."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
from laps_core.config import LapsConfig
from laps_core.scheduling.plan import Plan, Waiting
from laps_core.scheduling.window import HEAD_MAX, SIGMA_S, Window
from windows import MS, TOKEN_S, about, held, left, predict, short

Predict = Callable[[Sequence[tuple[int, int]]], "float | None"]


class Told:
    """What is predicted, from test to test."""

    now: Predict = staticmethod(predict)

    def __call__(self, requests: Sequence[tuple[int, int]]) -> float | None:
        return self.now(requests)


TOLD = Told()


def made(config: LapsConfig | None = None) -> Window:
    return Window(config or LapsConfig(), TOLD)


def ask(
    window: Window, now: float, shorts: list[Waiting], *, predict: Predict = predict, token_budget: int = 8192
) -> Plan:
    TOLD.now = predict
    return window.decide(now, shorts, token_budget=token_budget)


def known_bursts() -> tuple[Window, float]:
    """A window that expects seven more requests within 3 ms of a first one, which arrives now."""
    window, now = made(), 1.0
    for _ in range(3):
        for i in range(8):
            window.arrived(now + 0.4 * MS * i)
        window.dispatched(now + 2.8 * MS, 8, 0.0, "idle")
        window.completed(now + 12 * MS, 8)
        now += 0.2
    window.arrived(now)
    return window, now


def test_holds_that_do_not_pay_are_given_up_and_tried_again_ever_more_seldom() -> None:
    window, now, holds = made(), 1.0, []
    for i in range(-3, 40):
        # A burst, which nobody waits for; then a first request that has no others behind it.
        window.arrived(now)
        window.arrived(now + 2 * MS, 7)
        window.dispatched(now + 2 * MS, 8, 0.0, "idle")
        window.completed(now + 12 * MS, 8)
        now += 0.2
        if i < 0:
            continue
        window.arrived(now)
        first, answer = now, ask(window, now, [short(now)])
        if answer.waiting:
            holds.append(i)
            now = answer.until_s
            answer = ask(window, now, [short(first)])
        assert not answer.waiting
        window.dispatched(now, 1, answer.waited_s, answer.reason)
        window.completed(now + 9 * MS, 1)
        now += 0.1
    # Two batches leave in a round, and so half as many rounds are skipped as chances: 1, 2, 4, 8, 16, 32.
    assert [b - a - 1 for a, b in itertools.pairwise(holds)] == [1, 1, 2, 4, 8, 16]


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
    """Whoever sleeps until then may wake late."""
    window = made(LapsConfig(window="fixed", wait_window_ms=500.0))
    one = [short(deadline=0.1)]
    assert ask(window, 0.0, one, predict=lambda _: 0.0).waiting
    assert ask(window, 0.15, one, predict=lambda _: 0.0) == left((0,), "slack", about(0.15), late=1)


def test_one_that_came_too_late_does_not_end_the_hold_of_others() -> None:
    window = made(LapsConfig(window="fixed", wait_window_ms=500.0))
    assert ask(window, 0.0, [short()], predict=lambda _: 0.0).waiting
    assert ask(window, 0.1, [short(), short(0.1, deadline=0.05)], predict=lambda _: 0.0).waiting


def test_the_head_of_the_line_is_held_for_so_many_windows_whatever_runs() -> None:
    window, now = known_bursts()
    assert ask(window, now, [short(now)]).waiting
    window.completed(now + 18 * MS, 1)  # waiting was free until then
    window.arrived(now + 18 * MS)
    before = ask(window, now + 19.9 * MS, [short(now)] * 2)
    assert before.waiting or before.reason != "head_of_line"
    after = ask(window, now + HEAD_MAX * 5 * MS, [short(now)] * 2)
    assert after == left((0, 1), "head_of_line", about(20 * MS))


def test_a_wait_of_a_few_microseconds_is_none() -> None:
    window = made(LapsConfig(window="fixed"))
    answer = ask(window, 1.0, [short(1.0, deadline=1.0 + SIGMA_S + 10e-6)], predict=lambda _: 0.0)
    assert answer == left((0,), "idle")


def test_it_waits_no_longer_than_twice_what_the_last_full_batch_took() -> None:
    window, now = known_bursts()
    assert ask(window, now, [short(now)]).waiting
    now += 0.5 * MS
    window.arrived(now, 7)
    window.dispatched(now, 8, 0.5 * MS, "depth")
    assert window.status()["window_ms"] == about(1.0)
    window.completed(now + 9 * MS, 8)
    now += 1.0
    window.arrived(now)
    answer = ask(window, now, [short(now)])
    assert answer == held(about(now + 1 * MS))
    assert ask(window, now + 1 * MS, [short(now)]) == left((0,), "window", about(1 * MS))


def closed_loop(users: int) -> tuple[Window, float]:
    """A window that has served so many clients at once; their last batch is just done."""
    window, now = made(), 1.0
    for _ in range(20):
        window.arrived(now + 1 * MS, users)
        window.dispatched(now + 1 * MS, users, 0.0, "idle")
        now += 10 * MS
        window.completed(now, users)
    return window, now


def test_clients_are_waited_for_where_all_fit_into_the_batch() -> None:
    window, now = closed_loop(4)
    for there, fits in ((1, True), (4, True), (5, False), (7, False)):
        answer = ask(window, now, [short(now)] * there)
        assert answer == held(about(now + 1.05 * MS)) if fits else answer.reason == "idle"


def costly(fixed_s: float) -> Predict:
    return lambda requests: fixed_s + TOKEN_S * sum(new for new, _ in requests)


def test_clients_are_waited_for_no_longer_than_it_saves_or_a_deadline_allows() -> None:
    window, now = closed_loop(4)
    assert ask(window, now, [short(now)], predict=costly(1.06 * MS)).waiting
    assert ask(window, now, [short(now)], predict=costly(1.04 * MS)) == left((0,), "idle")
    for slack_s, waits in ((1.06 * MS, True), (1.04 * MS, False)):
        due = [short(now, deadline=now + predict([(100, 0)]) + SIGMA_S + slack_s)]
        assert ask(window, now, due).waiting == waits


TICK = 1 / 1024
"""Sums of such times are exact."""


def taking_turns() -> tuple[Window, float]:
    """A window that has served two groups of two, each of which comes back at an unknown time while the other runs."""
    window, at = made(), 1.0
    for _ in range(30):
        window.dispatched(at, 2, 0.0, "idle")
        window.completed(at + 6 * TICK, 2)
        window.arrived(at + 6.25 * TICK, 2, blind_since=at + 0.25 * TICK)
        at += 6.25 * TICK
    return window, at


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


def test_with_deadlines_the_rest_of_a_burst_is_not_waited_for_once_more_are_there_anyhow() -> None:
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
    assert ask(window, now, [short(now, deadline=now + 1.0)]) == held(about(done + 1.05 * MS))
    until_s = ask(window, now, [short(now)]).until_s
    assert until_s > done + 1.2 * MS


def test_a_wait_behind_what_runs_is_free_and_earns_nothing() -> None:
    window, now = known_bursts()
    assert ask(window, now, [short(now)]).waiting
    now += 2 * MS
    window.completed(now, 1)
    window.arrived(now, 7)
    answer = ask(window, now, [short(now)] * 8)
    window.dispatched(now, 8, answer.waited_s, answer.reason)
    window.completed(now + 9 * MS, 8)
    waited = []
    for _ in range(3):  # nobody follows the first one any more
        now += 0.2
        window.arrived(now)
        first, answer = now, ask(window, now, [short(now)])
        waited.append(answer.waiting)
        if answer.waiting:
            now = answer.until_s
            answer = ask(window, now, [short(first)])
        window.dispatched(now, 1, answer.waited_s, answer.reason)
        window.completed(now + 9 * MS, 1)
    assert waited == [True, True, False], "what the first one has cost is known when the second one leaves"


def test_holds_that_paid_outweigh_some_that_did_not() -> None:
    window, now = known_bursts()

    def chance(comes: bool) -> bool:
        """A first request, whether the others come or not; whether they were waited for."""
        nonlocal now
        answer = ask(window, now, [short(now)])
        waited, there = answer.waiting, [short(now)]
        if answer.waiting:
            now = now + 2 * MS if comes else answer.until_s
            if comes:
                window.arrived(now, 7)
            there += [short(now)] * 7 if comes else []
            answer = ask(window, now, there)
        assert not answer.waiting
        window.dispatched(now, len(answer.picked), answer.waited_s, answer.reason)
        window.completed(now + 9 * MS, len(answer.picked))
        now += 0.2
        window.arrived(now)
        return waited

    assert all(chance(True) for _ in range(6))
    assert [chance(False) for _ in range(7)] == [True] * 4 + [False] * 3
    assert all(chance(True) for _ in range(12))
    assert [chance(False) for _ in range(10)] == [True] * 6 + [False] * 3 + [True], "no more are skipped than before"


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
