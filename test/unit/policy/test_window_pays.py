"""Cost and benefit of holds."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from laps_core.config import LapsConfig
from laps_core.policy.hold import PAYS, Window
from windows import MS, decide, make_adjustable_window, predict, short_prompt

W_MAX_S = LapsConfig().wait_window_ms * MS


@dataclass
class RandomBursts:
    """Bursts: a first request, possibly followed by seven others."""

    window: Window = field(default_factory=make_adjustable_window)
    pause_s: float = 0.2
    now: float = 1.0

    def burst(self, comes: bool) -> float | None:
        """Run one burst. Return the time for which the window held the first request; None if it did not."""
        window, first = self.window, self.now
        window.record_arrivals(first)
        waiting = [short_prompt(first)]
        answer = decide(window, first, waiting)
        held_s: float | None = None
        if answer.held == "window":
            self.now = first + 2 * MS if comes else answer.account.until_s
            if comes:
                window.record_arrivals(self.now, 7)
                waiting += [short_prompt(self.now)] * 7
            held_s = self.now - first
            answer = decide(window, self.now, waiting)
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
def test_hold_takes_at_most_half_of_batch_time(seed: int, comes: float, pause_s: float) -> None:
    rng, bursts = random.Random(seed), RandomBursts(pause_s=pause_s)
    for _ in range(4):
        bursts.burst(True)
    held = [bursts.burst(rng.random() < comes) for _ in range(60)]
    assert all(h is None or h <= min(W_MAX_S, PAYS * predict([(100, 0)])) + 1e-9 for h in held)


def test_holds_stop_without_followers_and_resume_on_return() -> None:
    bursts = RandomBursts()
    waits = [bursts.burst(comes) is not None for comes in [True] * 24 + [False] * 40 + [True] * 40]
    assert all(waits[4:24])
    assert waits[24:64].count(True) <= 12, "earlier bursts had told otherwise"
    assert not any(waits[40:64])
    assert all(waits[-9:])


def test_few_failed_holds_do_not_stop_holding() -> None:
    bursts = RandomBursts()
    bursts.burst(True)
    assert all([bursts.burst(True) is not None for _ in range(6)] + [bursts.burst(False) is not None for _ in range(2)])


@pytest.mark.parametrize(("came", "waits"), [(12, False), (13, True)])
def test_hold_needs_more_than_even_chance(came: int, waits: bool) -> None:
    bursts = RandomBursts()
    for i in range(24):
        bursts.burst(i < came)
    assert (bursts.burst(True) is not None) == waits
