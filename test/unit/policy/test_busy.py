"""Busy share of a device, compared with exact values."""

from __future__ import annotations

import math

import pytest
from laps_core.busy import HORIZON_S, BusyMeter


def test_busy_share_grows_with_interval_length_and_decays() -> None:
    meter = BusyMeter()
    assert meter.share(7.0) == 0.0
    meter.add(100.0, 103.0)
    busy = 1.0 - math.exp(-3 / HORIZON_S)
    assert meter.share(103.0) == pytest.approx(busy)
    assert meter.share(105.0) == pytest.approx(busy * math.exp(-2 / HORIZON_S))
    assert meter.share(102.0) == pytest.approx(busy), "the clock is read before the interval ended"
    meter.add(105.0, 106.0)
    assert meter.share(106.0) == pytest.approx(busy * math.exp(-3 / HORIZON_S) + 1.0 - math.exp(-1 / HORIZON_S))


def test_busy_share_saturates_at_one_and_ignores_backward_time() -> None:
    meter = BusyMeter()
    meter.add(0.0, 1000.0)
    assert meter.share(1000.0) == pytest.approx(1.0)
    meter.add(1000.0, 999.0)
    assert meter.share(999.0) == pytest.approx(1.0)
