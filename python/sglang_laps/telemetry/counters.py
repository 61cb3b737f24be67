"""SGLang's counters of work, corrected for pauses and for rows of streams that prefill batches carry."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler

    from sglang_laps.flights import Flight


def correct(scheduler: Scheduler, flight: Flight, busy_us: int) -> None:
    """Correct what SGLang has counted for a batch whose result is processed. `busy_us`: prefill time before that
    (microseconds).

    SGLang counts prefill time from launch to result, or from the last prefill batch in a pause on. It counts generated
    tokens only in decode steps.
    """
    if flight.paused_s and scheduler.total_prefill_busy_us > busy_us:
        scheduler.total_prefill_busy_us = busy_us + round(1e6 * flight.lasted_s)
    reporter = scheduler.metrics_reporter
    reporter.num_generated_tokens += flight.rows
    if flight.rows and reporter.current_scheduler_metrics_enabled:
        reporter.metrics_collector.increment_realtime_tokens(None, decode_tokens=flight.rows)
