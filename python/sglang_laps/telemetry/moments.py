"""Moments in the life of a request, from the time stamps that SGLang keeps."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from laps_core.receipts.account import Moments, Wait
from laps_core.receipts.ledger import whole_us
from laps_core.receipts.receipt import LONGEST_ID

from sglang_laps import seams

if TYPE_CHECKING:
    from laps_core.length import ClassName
    from laps_core.receipts.receipt import Cause
    from sglang.srt.managers.schedule_batch import Req

_STATS = "observability.req_time_stats"
_SENT = ("created_time", "api_server_dispatch_time")
"""Stamps of the HTTP server for which SGLang has fields but which SGLang does not send."""


def hook_senders() -> None:
    """Have the HTTP server and the data-parallel controller send their stamps to the schedulers."""
    for name in ("APIServerReqTimeStats", "DPControllerReqTimeStats"):
        if not seams.hooked(target := f"{_STATS}.{name}.__getstate__"):
            seams.hook(target, _with_stamps, "AROUND")


def hook_scheduler() -> None:
    """Have the scheduler record when a request waits for its KV from storage or from host memory."""
    stats = f"{_STATS}.SchedulerReqTimeStats"
    seams.hook(f"{stats}.observe_storage_prefetch_ready", _blocked_by("prefetch"), "AROUND")
    seams.hook(f"{stats}.observe_storage_staging_ready", _blocked_by("host_load"), "AROUND")


def _with_stamps(original: Callable[[Any], dict[str, Any]], stats: Any) -> dict[str, Any]:
    """Wrap ``__getstate__``: add the stamps."""
    state = original(stats)
    state.update((name, getattr(stats, name)) for name in _SENT)
    return state


def _blocked_by(cause: Cause) -> Callable[..., Any]:
    def observe(original: Callable[..., Any], stats: Any, ready: bool) -> Any:
        """Wrap the poll: record the time from the first poll that is not ready to the poll that is ready."""
        known = stats.__dict__.get("laps_blocked")
        if not ready:
            if known is None:
                known = stats.laps_blocked = []
            if not known or known[-1][1] is not None:
                known.append([time.perf_counter(), None, cause])
        elif known and known[-1][1] is None:
            known[-1][1] = time.perf_counter()
        return original(stats, ready)

    return observe


def of(req: Req, cls: ClassName, end_s: float) -> Moments:
    """Return the moments of a request of this class whose first token, or end, came at `end_s`
    (``time.perf_counter``)."""
    stats, tag = req.time_stats, getattr(req, "laps_tag", None)

    def us(seconds: float) -> int | None:
        return whole_us(seconds) if 0.0 < seconds <= end_s else None

    received, end = us(stats.scheduler_recv_time), whole_us(end_s)
    arrived = us(stats.created_time)
    blocked = getattr(stats, "laps_blocked", ())
    return Moments(
        rid=req.rid[:LONGEST_ID],
        cls=cls,
        arrived_us=next(us for us in (arrived, received, end) if us is not None),
        end_us=end,
        sent_us=us(stats.api_server_dispatch_time),
        received_us=received,
        asked_us=us(stats.prefill_bootstrap_queue_entry_time),
        waits_us=us(stats.wait_queue_entry_time),
        ready_us=us(stats.bootstrap_done_time),
        transferred_us=us(stats.prefill_kv_transfer_finish_time),
        runs=() if tag is None else tag.runs,
        blocked=[Wait(whole_us(begin), whole_us(end_s if ends is None else ends), why) for begin, ends, why in blocked],
    )
