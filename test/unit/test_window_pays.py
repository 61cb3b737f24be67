"""What the window learns from what its holds have brought."""

from __future__ import annotations

import itertools

import pytest
from windows import MS, TICK, ask, closed_loop, held, known_bursts, made, short, taking_turns


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


@pytest.mark.parametrize("late", [0, 1])
def test_a_hold_for_clients_has_paid_if_none_of_them_came_while_their_batch_ran(late: int) -> None:
    window, now = closed_loop(4)
    window.arrived(now)
    assert ask(window, now, [short(now)]).waiting
    for back, meanwhile in ((4, late), (5, 0)):
        now += 1 * MS
        window.arrived(now, back)
        window.dispatched(now, 5, 1 * MS, "idle")
        window.arrived(now + 5 * MS, meanwhile)
        now += 10 * MS
        window.completed(now, 5)
    assert ask(window, now, [short(now)]).waiting == (not late)


def test_a_hold_that_has_cost_what_it_saved_has_not_failed() -> None:
    window, now = taking_turns()
    for _ in range(2):
        assert ask(window, now, [short(now)] * 2, predict=lambda _: 2 * TICK) == held(now + 2 * TICK)
        window.dispatched(now + 2 * TICK, 4, 2 * TICK, "idle")
        now += 8 * TICK
        window.completed(now, 4)
        window.dispatched(now, 2, 0.0, "idle")
        now += 6 * TICK
        window.completed(now, 2)


def test_a_hold_for_a_burst_has_paid_whoever_comes_while_it_runs() -> None:
    window, now = known_bursts()
    assert ask(window, now, [short(now)]).waiting
    window.arrived(now + 2 * MS, 7)
    window.dispatched(now + 2 * MS, 8, 2 * MS, "depth")
    window.arrived(now + 5 * MS)
    window.completed(now + 11 * MS, 8)
    window.dispatched(now + 11 * MS, 1, 0.0, "idle")
    window.completed(now + 20 * MS, 1)
    now += 0.2
    window.arrived(now)
    assert ask(window, now, [short(now)]).waiting


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
