"""Requests and predictions that the window's tests share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from laps_core.config import LapsConfig
from laps_core.protocol import SHORT
from laps_core.scheduling.plan import Plan, Waiting
from laps_core.scheduling.window import Window

MS = 1e-3


FIXED_S, TOKEN_S = 8 * MS, 10e-6


def predict(requests: Sequence[tuple[int, int]]) -> float:
    return FIXED_S + TOKEN_S * sum(new for new, _ in requests)


def about(x: float) -> Any:
    """Equal to ``x`` but for rounding, wherever a number is compared."""
    return pytest.approx(x)


def short(at: float = 0.0, tokens: int = 100, deadline: float | None = None) -> Waiting:
    return Waiting(tokens, 0, at, deadline)


def opened(config: LapsConfig | None = None, depths: Sequence[int] = ()) -> Window:
    return Window(config or LapsConfig(), predict, depths)


def left(picked: tuple[int, ...], reason: str, waited_s: float = 0.0, late: int = 0) -> Plan:
    """The window lets a batch go."""
    return Plan((SHORT,), picked, reason=reason, waited_s=waited_s, late=late)


def held(until_s: float) -> Plan:
    """The window waits."""
    return Plan((), waiting=True, until_s=until_s)
