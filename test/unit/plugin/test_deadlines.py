"""Deadlines of requests: valid values, and the arrival time of a request."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
from laps_core import deadline
from laps_core.config import LapsConfig
from laps_core.length import LONG, SHORT
from sglang_laps import deadlines

HOSTILE: list[Any] = [True, False, "60", [60], {}]
HOSTILE += [5e-324, 1e-310, 1e-9, 0.099, 0, 0.0, -5, 1e9 + 1, 1e300, math.inf, math.nan, 10**30, 10**400, -(10**400)]


def request(custom: Any = None, created: float = 0.0, received: float = 0.0) -> Any:
    return SimpleNamespace(
        sampling_params=SimpleNamespace(custom_params=custom),
        time_stats=SimpleNamespace(created_time=created, scheduler_recv_time=received),
    )


@pytest.mark.parametrize("uptime", [0.5, 5.0, 600.0, 1e6])
def test_missing_arrival_time_falls_back_to_now(uptime: float) -> None:
    assert deadlines.arrival(request(received=uptime - 0.1), uptime) == uptime - 0.1
    assert deadlines.arrival(request(), uptime) == uptime


@pytest.mark.parametrize("ms", [0.1, 1, 60, 400.0, 1e9])
def test_valid_deadlines_are_accepted(ms: float) -> None:
    assert deadline.valid(ms)
    assert deadlines.slo_s(request({"ttft_slo_ms": ms}), LapsConfig(), SHORT) == ms / 1e3


@pytest.mark.parametrize("value", HOSTILE, ids=lambda v: str(v)[:12])
def test_invalid_deadline_is_rejected_on_verify_and_otherwise_ignored(value: Any) -> None:
    assert not deadline.valid(value)
    sent = request({"ttft_slo_ms": value})
    with pytest.raises(ValueError, match=r"^sampling_params\.custom_params\.ttft_slo_ms: .* is not a number") as e:
        deadlines.verify(sent.sampling_params)
    assert len(str(e.value)) < 200
    assert deadlines.slo_s(sent, LapsConfig(), LONG) is None
    assert deadlines.slo_s(sent, LapsConfig(ttft_slo_ms=250), LONG) == 0.25


def test_default_deadline_depends_on_class() -> None:
    both = LapsConfig(ttft_slo_ms=(400.0, 4000.0))
    assert [deadlines.slo_s(request(), both, kind) for kind in (SHORT, LONG)] == [0.4, 4.0]
    assert deadlines.slo_s(request({"ttft_slo_ms": 9}), both, LONG) == 0.009, "a request's own comes first"


@pytest.mark.parametrize("custom", [None, {}, {"ttft_slo_ms": None}, {"ttft_slo_ms": 5.0}, {"other": 10**400}])
def test_missing_or_valid_deadlines_pass_verification(custom: Any) -> None:
    deadlines.verify(request(custom).sampling_params)
