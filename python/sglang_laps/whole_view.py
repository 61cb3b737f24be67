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
    if scheduler.lora_drainer is not None:
        _drain_for_all(scheduler.lora_drainer, core, builder)
    _refresh_all(scheduler.policy, core, builder)
    if scheduler.request_receiver.recv_skipper is not None:
        # Between decode steps, --scheduler-recv-interval receives less often than in a prefill batch.
        last: Callable[[], Any] = scheduler.request_receiver.get_last_batch
        scheduler.request_receiver = replace(
            scheduler.request_receiver,
            get_last_batch=lambda: core.under_way[-1].batch if core.under_way else last(),
        )


def _drain_for_all(drainer: Any, core: LapsCore, builder: Builder) -> None:
    """Count the waiting time of each request for --lora-drain-wait-threshold, and the adapters of prompts in progress
    as running."""
    update = drainer.update_draining_state
    drainer.update_draining_state = lambda _, running: update(
        builder.waiting, [*running, *started(core, builder.begun)]
    )


def _refresh_all(policy: Any, core: LapsCore, builder: Builder) -> None:
    """Keep the cached prefixes of all waiting requests, which SGLang refreshes every 32 batches; in a pause that would
    take too long."""
    refresh = policy._touch_waiting_prefixes

    def refresh_all(active: Any, _: list[Any]) -> None:
        if not core.under_way:
            refresh(active, builder.waiting)

    policy._touch_waiting_prefixes = refresh_all
