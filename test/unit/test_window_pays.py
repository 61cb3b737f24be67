"""Cost of holds."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from laps_core.policy.hold import TRIAL, Window
from windows import FIXED_S, MS, ask, closed_loop, known_bursts, made, short

W_MAX_S = 5 * MS


@dataclass
class Chances:
    """First requests, each of which may have seven others behind it, on a server that knows of bursts."""

    window: Window = field(default_factory=made)
    pause_s: float = 0.2
    now: float = 1.0
    spent_s: float = 0.0
    saved_s: float = 0.0

    def taught(self) -> None:
        """A burst, which nobody waits for."""
        self.window.arrived(self.now)
        self.window.arrived(self.now + 2 * MS, 7)
        self.window.dispatched(self.now + 2 * MS, 8, 0.0, "idle")
        self.window.completed(self.now + 12 * MS, 8)
        self.now += self.pause_s

    def chance(self, comes: bool) -> bool:
        """Return True if the others were waited for. What holds cost and save is added up."""
        window, first = self.window, self.now
        window.arrived(first)
        answer = ask(window, first, [short(first)])
        waited, there = answer.held == "window", [short(first)]
        if waited:
            self.now = first + 2 * MS if comes else answer.account.until_s
            if comes:
                window.arrived(self.now, 7)
                there += [short(self.now)] * 7
                self.saved_s += FIXED_S
            answer = ask(window, self.now, there)
            self.spent_s += self.now - first
        assert answer.held != "window"
        window.dispatched(self.now, len(answer.picked), answer.account.waited_s, answer.account.reason)
        window.completed(self.now + 9 * MS, len(answer.picked))
        self.now += self.pause_s
        return waited


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 1 << 30), st.sampled_from([0.0, 0.2, 0.5, 1.0]), st.integers(0, 3), st.sampled_from([0.02, 0.2]))
def test_holds_cost_no_more_than_they_save_and_a_share_of_the_time(
    seed: int, comes: float, lessons: int, pause_s: float
) -> None:
    rng, me = random.Random(seed), Chances(pause_s=pause_s)
    log = []
    for _ in range(60):
        for _ in range(lessons):
            me.taught()
        me.chance(rng.random() < comes)
        log.append((me.now, me.spent_s - me.saved_s))
    for begin, cost in log[::7]:
        for end, later in log:
            assert end <= begin or later - cost <= TRIAL * (end - begin) + 2 * W_MAX_S + 1e-9


def test_holds_that_do_not_pay_are_given_up_and_tried_again() -> None:
    me = Chances(pause_s=0.02)
    for _ in range(3):
        me.taught()
    tried = []
    for comes in [False] * 60 + [True] * 30:
        me.taught()
        me.taught()
        tried.append(me.chance(comes))
    assert tried[0]
    assert tried[:60].count(False) > 5
    assert any(tried[50:60])
    assert all(tried[-9:])


def test_holds_that_paid_outweigh_some_that_did_not() -> None:
    me = Chances()
    for _ in range(3):
        me.taught()
    assert all([me.chance(True) for _ in range(6)] + [me.chance(False) for _ in range(2)])


def test_a_wait_behind_what_runs_is_free_and_earns_nothing() -> None:
    window, now = known_bursts()
    for fails in range(5):
        assert ask(window, now, [short(now)]).held == "window", fails
        now += 2 * MS
        window.completed(now, 1)
        answer = ask(window, now, [short(now)])
        window.dispatched(now, 1, answer.account.waited_s, answer.account.reason)
        window.completed(now + 9 * MS, 1)
        for _ in range(3):
            now += 0.2
            window.arrived(now)
            window.arrived(now + 2 * MS, 7)
            window.dispatched(now + 2 * MS, 8, 0.0, "idle")
            window.completed(now + 12 * MS, 8)
        now += 0.2
        window.arrived(now)


@pytest.mark.parametrize("late", [0, 1])
def test_a_hold_has_paid_whoever_comes_while_its_batch_runs(late: int) -> None:
    window, now = closed_loop(4)
    for _ in range(5):
        window.arrived(now)
        assert ask(window, now, [short(now)]).held == "window"
        window.arrived(now + 1 * MS, 3)
        window.dispatched(now + 1 * MS, 4, 1 * MS, "idle")
        window.arrived(now + 5 * MS, late)
        window.completed(now + 10 * MS, 4)
        window.dispatched(now + 10 * MS, late, 0.0, "idle")
        now += 10 * MS
