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


def about(x: float) -> Any:
    """Equal to ``x`` but for rounding, wherever a number is compared."""
    return pytest.approx(x)


def short(at: float = 0.0, tokens: int = 100, deadline: float | None = None) -> Waiting:
    return Waiting(tokens, 0, at, deadline)


def opened(config: LapsConfig | None = None) -> Window:
    return Window(config or LapsConfig(), predict)


def left(picked: tuple[int, ...], reason: str, waited_s: float = 0.0, late: int = 0) -> Plan:
    """The window lets a batch go."""
    return Plan((SHORT,), picked, account=Account(reason, waited_s, late))


def held(until_s: float) -> Plan:
    """The window waits."""
    return Plan((), held="window", account=Account(until_s=until_s))


class Told:
    """Predictions, from test to test."""

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


def closed_loop(users: int) -> tuple[Window, float]:
    """A window that has served so many clients at once; their last batch is just done."""
    window, now = made(), 1.0
    for _ in range(20):
        window.arrived(now + 1 * MS, users)
        window.dispatched(now + 1 * MS, users, 0.0, "idle")
        now += 10 * MS
        window.completed(now, users)
    return window, now


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
