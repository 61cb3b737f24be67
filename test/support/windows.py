"""Requests and predictions that the window's tests share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from laps_core.scheduling.waiting import Waiting

MS = 1e-3


FIXED_S, TOKEN_S = 8 * MS, 10e-6


def predict(requests: Sequence[tuple[int, int]]) -> float:
    return FIXED_S + TOKEN_S * sum(new for new, _ in requests)


def about(x: float) -> Any:
    """Equal to ``x`` but for rounding, wherever a number is compared."""
    return pytest.approx(x)


def short(at: float = 0.0, tokens: int = 100, deadline: float | None = None) -> Waiting:
    return Waiting(tokens, 0, at, deadline)
