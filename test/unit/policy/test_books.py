"""Device time of each batch."""

from __future__ import annotations

import pytest
from laps_core.busy import BusyMeter
from laps_core.config import LapsConfig
from laps_core.length import LONG, SHORT
from laps_core.policy.pacer import Pacer
from laps_core.policy.types import Running


def batch(started: float | None, done: float | None, *, within: bool = False, short: bool = False) -> Running:
    return Running(
        cls=SHORT if short else LONG, shape=[(100, 0)], short=(0,) if short else (), within=within, started=started,
        done=done,
    )  # fmt: skip


@pytest.fixture
def pacer() -> Pacer:
    return Pacer(LapsConfig(wait_window_ms=0.0), chunk_tokens=8192, layers=28)


def test_device_time_of_consecutive_batches_does_not_overlap(pacer: Pacer) -> None:
    assert pacer.record_result(batch(11.0, 11.5), None, 12.0) == 0.5
    assert pacer.record_result(batch(11.25, 12.25), None, 12.5) == 0.75, "it was sent while the first one ran"
    assert pacer.record_result(batch(13.0, None), None, 13.5) == 0.5, "done as its result is processed"
    assert pacer.record_result(batch(None, 14.0), None, 15.0) == 0.0, "nobody knows when it began"
    busy = BusyMeter()
    for begin, end in ((11.0, 11.5), (11.5, 12.25), (13.0, 13.5)):
        busy.add(begin, end)
    assert pacer.busy.share(14.0) == pytest.approx(busy.share(14.0))


def test_batch_in_pause_is_not_charged_to_paused_batch(pacer: Pacer) -> None:
    below, between = batch(11.0, 13.0), batch(11.25, 12.25, within=True)
    assert pacer.record_result(batch(11.5, 11.75, within=True, short=True), between, 11.75) == 0.25
    assert pacer.record_result(between, below, 12.25) == 0.75
    assert pacer.record_result(batch(12.5, 12.625, within=True, short=True), below, 12.625) == 0.125
    assert pacer.busy.share(13.0) == 0.0, "the device is busy with the lowest of them all the time"
    assert pacer.record_result(below, None, 13.0) == 2.0 - 1.0 - 0.125
    assert pacer.record_result(batch(13.5, 14.0, within=True, short=True), None, 14.0) == 0.5
    busy = BusyMeter()
    busy.add(11.0, 13.0)
    assert pacer.busy.share(13.0) == pytest.approx(busy.share(13.0))
