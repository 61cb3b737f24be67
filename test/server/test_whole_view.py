"""Parts of SGLang that see the whole queue, the prompts in progress and the paused batch, also during a build."""

from __future__ import annotations

import time
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from laps_core.length import SHORT
from sglang_laps.flights import Part

from .fields import Request, SchedulerFields


@dataclass(frozen=True)
class Receiver:
    """SGLang's receiver of requests."""

    get_last_batch: Any
    recv_skipper: Any = None


def show(scheduler: Any, *, drainer: Any = None, skipper: Any = None) -> list[list[str]]:
    """Give the scheduler these parts of SGLang, and return the ids of waiting requests whose prefixes are refreshed."""
    from sglang_laps import whole_view

    refreshed: list[list[str]] = []
    scheduler.policy._touch_waiting_prefixes = lambda _, queue: refreshed.append([r.rid for r in queue])
    scheduler.lora_drainer = drainer
    scheduler.last_batch, scheduler.request_receiver = "last", Receiver(lambda: scheduler.last_batch, skipper)
    whole_view.show(scheduler, scheduler.laps.core, scheduler.laps.builder)
    return refreshed


def adapted(rid: str, adapter: str, new: int = 9, waits_s: float = 0.0) -> Request:
    """Return a request with a LoRA adapter and this many tokens to come."""
    req: Any = Request(rid)
    req.lora_id, req.output_ids, req.sampling_params = adapter, [], SimpleNamespace(max_new_tokens=new)
    req.time_stats = SimpleNamespace(wait_queue_entry_time=time.monotonic() - waits_s)
    return req  # type: ignore[no-any-return]


@pytest.mark.parametrize("in_pause", [False, True])
def test_adapter_of_prompt_in_progress_is_drained_for_request_that_is_not_shown(in_pause: bool) -> None:
    """Two adapters fit: that of a stream, and that of the prompt."""
    from sglang.srt.lora.lora_drainer import LoRADrainer

    drainer, stream, prompt = LoRADrainer(2, 1.0), adapted("stream", "a", new=99), adapted("P", "b")
    shown, starves = adapted("shown", "a"), adapted("starves", "c", waits_s=5.0)
    scheduler: Any = SchedulerFields(
        [shown, starves], stock=lambda _: drainer.update_draining_state(scheduler.waiting_queue, [stream])
    )
    show(scheduler, drainer=drainer)
    builder, core = scheduler.laps.builder, scheduler.laps.core

    def drained() -> list[Any]:
        builder.build_part(Part(SHORT, [shown]), None)
        return [adapter for adapter, stats in drainer.adapter_to_stats.items() if stats.is_draining_for == "c"]

    builder.begun, core.under_way = (
        ([], [SimpleNamespace(batch=SimpleNamespace(reqs=[prompt]))]) if in_pause else ([prompt], [])
    )
    assert [drained(), drained()] == [["b"]] * 2
    builder.begun, core.under_way = [], []
    assert not drained()


def test_prefixes_of_whole_queue_are_refreshed_between_passes() -> None:
    scheduler: Any = SchedulerFields(
        [Request("s"), Request("L")],
        stock=lambda _: scheduler.policy._touch_waiting_prefixes("fcfs", scheduler.waiting_queue),
    )
    refreshed = show(scheduler)
    scheduler.laps.builder.build_part(Part(SHORT, scheduler.waiting_queue[:1]), None)
    scheduler.laps.core.under_way = ["paused"]
    scheduler.laps.builder.build_part(Part(SHORT, scheduler.waiting_queue[:1]), None)
    assert refreshed == [["s", "L"]]


def test_requests_are_received_in_pause_as_in_prefill_batch() -> None:
    """With --scheduler-recv-interval, the batch before the paused one can be a decode step."""
    scheduler: Any = SchedulerFields([])
    show(scheduler, skipper="skipper")
    receiver = scheduler.request_receiver
    assert receiver.get_last_batch() == "last"
    scheduler.laps.core.under_way = [SimpleNamespace(batch="paused")]
    assert receiver.get_last_batch() == "paused"
    assert receiver.recv_skipper == "skipper"
