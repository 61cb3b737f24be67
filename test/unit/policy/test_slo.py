"""Statistics of deadlines."""

from __future__ import annotations

import json

import pytest
from laps_core.slo import OVERSHOOT_MAX, SloLedger


def test_ledger_counts_deadlines_per_class() -> None:
    ledger = SloLedger()
    for ttft in (0.1, 0.4, 0.6):
        ledger.record(0.0, "short", ttft, 0.4)
    ledger.record(0.0, "long", 1.0, 4.0)
    ledger.record(0.0, "long", 9.0, None)
    said = json.loads(json.dumps(ledger.status(0.0)))
    assert said["short"]["attainment"] == pytest.approx(2 / 3)
    assert said["long"]["attainment"] == 1.0
    assert [(said[kind]["met"], said[kind]["missed"]) for kind in ("short", "long")] == [(2, 1), (1, 0)]
    assert said["short"]["deviation"] == ledger.deviation(0.0, "short") == pytest.approx(0.5 / 3)
    assert ledger.deviation(0.0) == pytest.approx(0.5 / 4)


def test_deviation_decays_but_attainment_does_not() -> None:
    ledger = SloLedger()
    for _ in range(50):
        ledger.record(0.0, "short", 0.8, 0.4)
    assert ledger.deviation(0.0) == pytest.approx(1.0)
    assert ledger.deviation(10.0) == pytest.approx(1.0), "half of them are left, and half of what they were late"
    for _ in range(50):
        ledger.record(30.0, "short", 0.2, 0.4)
    assert ledger.deviation(30.0) == pytest.approx(1 / 9)
    assert ledger.deviation(200.0) < 0.01
    assert ledger.status(200.0)["short"]["attainment"] == 0.5


def test_requests_without_deadline_are_not_counted() -> None:
    ledger = SloLedger()
    assert ledger.deviation(1.0) == 0.0
    ledger.record(0.0, "short", 9.0, None)
    assert ledger.status(0.0) == {}


def test_overshoot_of_one_request_is_capped() -> None:
    ledger = SloLedger()
    ledger.record(0.0, "short", 600.0, 1e-4)
    assert ledger.deviation(0.0) == OVERSHOOT_MAX
    for _ in range(99):
        ledger.record(0.0, "short", 0.1, 0.4)
    assert ledger.deviation(0.0) == pytest.approx(OVERSHOOT_MAX / 100)
    assert ledger.status(0.0)["short"]["missed"] == 1


def test_reading_status_does_not_change_ledger() -> None:
    asked, left_alone = SloLedger(), SloLedger()
    for at in (0.0, 3.0, 7.0):
        for ledger in (asked, left_alone):
            ledger.record(at, "short", 0.7, 0.4)
        for later in (1.0, 50.0):
            asked.deviation(at + later)
            asked.status(at + later)
    assert asked.status(8.0) == left_alone.status(8.0)
