"""Cost and benefit of holds."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from laps_core.config import LapsConfig
from laps_core.policy.hold import PAYS, Window
from windows import MS, ask, made, predict, short

W_MAX_S = LapsConfig().wait_window_ms * MS


@dataclass
class Chances:
    """Bursts: a first request, possibly followed by seven others."""

    window: Window = field(default_factory=made)
    pause_s: float = 0.2
    now: float = 1.0

    def burst(self, comes: bool) -> float | None:
        """Run one burst. Return the time for which the window held the first request; None if it did not."""
        window, first = self.window, self.now
        window.record_arrivals(first)
        waiting = [short(first)]
        answer = ask(window, first, waiting)
        held_s: float | None = None
        if answer.held == "window":
            self.now = first + 2 * MS if comes else answer.account.until_s
            if comes:
                window.record_arrivals(self.now, 7)
                waiting += [short(self.now)] * 7
            held_s = self.now - first
            answer = ask(window, self.now, waiting)
        assert answer.held != "window"
        self._runs(answer.picked)
        if held_s is None and comes:
            window.record_arrivals(first + 2 * MS, 7)
            self._runs((0,) * 7)
        self.now += self.pause_s
        return held_s

    def _runs(self, picked: tuple[int, ...]) -> None:
        self.window.record_dispatch(self.now, len(picked), 0.0, "idle")
        self.now += predict([(100, 0)] * len(picked))
        self.window.record_completion(self.now, len(picked))


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 1 << 30), st.sampled_from([0.0, 0.2, 0.5, 0.9, 1.0]), st.sampled_from([0.02, 0.2]))
def test_whatever_comes_a_hold_takes_no_longer_than_half_of_the_batchs_own_time(
    seed: int, comes: float, pause_s: float
) -> None:
    rng, me = random.Random(seed), Chances(pause_s=pause_s)
    for _ in range(4):
        me.burst(True)
    held = [me.burst(rng.random() < comes) for _ in range(60)]
    assert all(h is None or h <= min(W_MAX_S, PAYS * predict([(100, 0)])) + 1e-9 for h in held)


def test_who_does_not_come_any_more_is_not_waited_for_until_they_come_again() -> None:
    me = Chances()
    waits = [me.burst(comes) is not None for comes in [True] * 24 + [False] * 40 + [True] * 40]
    assert all(waits[4:24])
    assert waits[24:64].count(True) <= 12, "earlier bursts had told otherwise"
    assert not any(waits[40:64])
    assert all(waits[-9:])


def test_holds_that_paid_outweigh_some_that_did_not() -> None:
    me = Chances()
    me.burst(True)
    assert all([me.burst(True) is not None for _ in range(6)] + [me.burst(False) is not None for _ in range(2)])


@pytest.mark.parametrize(("came", "waits"), [(12, False), (13, True)])
def test_a_hold_needs_more_than_an_even_chance(came: int, waits: bool) -> None:
    me = Chances()
    for i in range(24):
        me.burst(i < came)
    assert (me.burst(True) is not None) == waits
