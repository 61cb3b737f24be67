"""Parts of SGLang that see all requests, also while its batch builder is shown only some of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sglang_laps.builder import Builder
from sglang_laps.colocated import started
from sglang_laps.core import LapsCore

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler


def show(scheduler: Scheduler, core: LapsCore, builder: Builder) -> None:
    """Show these parts the whole queue, the prompts in progress and the paused batch."""
    drainer, policy = scheduler.lora_drainer, scheduler.policy
    if drainer is not None:
        # --lora-drain-wait-threshold counts the waiting time of each request, and which adapters run.
        update = drainer.update_draining_state
        drainer.update_draining_state = lambda _, running: update(
            builder.waiting, [*running, *started(core, builder.begun)]
        )
    # SGLang refreshes the cached prefixes of waiting requests every 32 batches; in a pause that would take too long.
    refresh = policy._touch_waiting_prefixes
    policy._touch_waiting_prefixes = lambda active, _: None if core.under_way else refresh(active, builder.waiting)
    if scheduler.request_receiver.recv_skipper is not None:
        # Between decode steps, --scheduler-recv-interval receives less often than in a prefill batch.
        last: Callable[[], Any] = scheduler.request_receiver.get_last_batch
        scheduler.request_receiver = replace(
            scheduler.request_receiver,
            get_last_batch=lambda: core.under_way[-1].batch if core.under_way else last(),
        )
