"""Requests and predictions that the window's tests share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from laps_core.config import LapsConfig
from laps_core.length import SHORT
from laps_core.policy.hold import Window
from laps_core.policy.types import Account, Plan, Waiting

MS = 1e-3
Predict = Callable[[Sequence[tuple[int, int]]], "float | None"]


FIXED_S, TOKEN_S = 8 * MS, 10e-6


def predict(requests: Sequence[tuple[int, int]]) -> float:
    return FIXED_S + TOKEN_S * sum(new for new, _ in requests)


def approximate(x: float) -> Any:
    """Return a value that equals ``x`` except for rounding, also inside compared objects."""
    return pytest.approx(x)


def short_prompt(at: float = 0.0, tokens: int = 100, deadline: float | None = None) -> Waiting:
    return Waiting(tokens, 0, at, deadline)


def make_window(config: LapsConfig | None = None) -> Window:
    return Window(config or LapsConfig(), predict)


def release_plan(picked: tuple[int, ...], reason: str, waited_s: float = 0.0, late: int = 0) -> Plan:
    """Return the plan of a window that releases a batch."""
    return Plan((SHORT,), picked, account=Account(reason, waited_s, late))


def hold_plan(until_s: float) -> Plan:
    """Return the plan of a window that holds its batch until ``until_s``."""
    return Plan((), held="window", account=Account(until_s=until_s))


class ReplaceablePrediction:
    """Latency prediction that a test can replace."""

    now: Predict = staticmethod(predict)

    def __call__(self, requests: Sequence[tuple[int, int]]) -> float | None:
        return self.now(requests)


PREDICTION = ReplaceablePrediction()


def make_adjustable_window(config: LapsConfig | None = None) -> Window:
    return Window(config or LapsConfig(), PREDICTION)


def decide(
    window: Window, now: float, shorts: list[Waiting], *, predict: Predict = predict, token_budget: int = 8192
) -> Plan:
    PREDICTION.now = predict
    return window.decide(now, shorts, token_budget=token_budget)


def window_after_bursts() -> tuple[Window, float]:
    """Return a window that expects seven more requests within 3 ms of the first, and the first's arrival time (now)."""
    window, now = make_adjustable_window(), 1.0
    for _ in range(3):
        for i in range(8):
            window.record_arrivals(now + 0.4 * MS * i)
        window.record_dispatch(now + 2.8 * MS, 8, 0.0, "idle")
        window.record_completion(now + 12 * MS, 8)
        now += 0.2
    window.record_arrivals(now)
    return window, now


def window_after_closed_loop(users: int) -> tuple[Window, float]:
    """Return a window that has always served ``users`` clients together, and the time when their last batch ended."""
    window, now = make_adjustable_window(), 1.0
    for _ in range(20):
        window.record_arrivals(now + 1 * MS, users)
        window.record_dispatch(now + 1 * MS, users, 0.0, "idle")
        now += 10 * MS
        window.record_completion(now, users)
    return window, now


TICK = 1 / 1024
"""Time unit (seconds) whose sums have no rounding errors."""


def window_after_turns() -> tuple[Window, float]:
    """Return a window that has served two groups of two, which come back at unknown times while the other runs; now."""
    window, at = make_adjustable_window(), 1.0
    for _ in range(30):
        window.record_dispatch(at, 2, 0.0, "idle")
        window.record_completion(at + 6 * TICK, 2)
        window.record_arrivals(at + 6.25 * TICK, 2, blind_since=at + 0.25 * TICK)
        at += 6.25 * TICK
    return window, at
