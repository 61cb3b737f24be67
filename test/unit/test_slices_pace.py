"""The host is one slice ahead of the device, and knows when the slice that runs should be over."""

from __future__ import annotations

import math
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang_laps import slices

SLICE_S = 0.02


class Device:
    """Each launch takes SLICE_S, one after the other; an event waits for what was launched before it."""

    def __init__(self) -> None:
        self.free = 0.0

    def launch(self, batch: Any, *_: Any, split_forward_count: int = 0, **__: Any) -> None:
        self.free = max(self.free, time.perf_counter()) + SLICE_S
        batch.split_index += split_forward_count

    def module(self, _: str) -> Any:
        device = self

        class Event:
            def record(self) -> None:
                self.at = device.free

            def synchronize(self) -> None:
                time.sleep(max(0.0, self.at - time.perf_counter()))

        return SimpleNamespace(Event=Event)


def test_what_is_launched_in_a_pause_begins_when_the_slice_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    runner = SimpleNamespace(
        model_config=SimpleNamespace(num_hidden_layers=6), forward=device.launch, device="cuda"
    )  # fmt: skip
    monkeypatch.setattr(torch, "get_device_module", device.module)
    cutter = slices.Slices(runner)
    seen: list[tuple[float, float]] = []

    def pause(_: int) -> bool:
        seen.append((cutter.free_s, device.free))
        return False

    with cutter.cut(1, pause):
        runner.forward(SimpleNamespace(forward_mode=None, split_index=0))
    told = [(free_s, really) for free_s, really in seen if not math.isinf(free_s)]
    assert len(seen) == 5
    assert len(told) >= 2
    # On a machine that is held up it is late, never early by more than a sleep's grain.
    assert all(free_s > really - 0.5 * SLICE_S for free_s, really in told)
