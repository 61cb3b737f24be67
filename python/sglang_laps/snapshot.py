"""What one scheduler is doing, JSON-ready. Asking changes nothing: ranks are asked at different moments, or only one
is, and must not part by it."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from laps_core.config import LapsConfig
from laps_core.length import LengthClass, classify
from laps_core.protocol import Load, Status
from laps_core.scheduling.queues import split

from sglang_laps import __version__, graphs
from sglang_laps.classes import Tag

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler

    from sglang_laps.start import Laps


def off(config: LapsConfig, reason: str | None) -> dict[str, Any]:
    """Of a scheduler that LAPS leaves alone, and why."""
    return {**Status(enabled=False, version=__version__).as_dict(), "reason": reason, "config": config.as_dict()}


def snapshot(scheduler: Scheduler, config: LapsConfig, laps: Laps) -> dict[str, Any]:
    """Of a scheduler with LAPS. Times in seconds, lengths in tokens."""
    now = time.perf_counter()
    core, pacer, classes = laps.core, laps.core.pacer, laps.core.classes
    tags = [classes.tag_of(r, now) for r in scheduler.waiting_queue]
    views = split(tags, lambda tag: classify(tag.new_tokens, classes.threshold))
    queues = {cls.value: _queue(views.of(cls), now) for cls in LengthClass}
    every = [*([] if scheduler.chunked_req is None else [scheduler.chunked_req]), *core.parked]
    remaining = sum(max(0, r.seqlen - r.prefix_len) for r in every)
    load = Load(
        backlog_tokens=sum(q["waiting_tokens"] for q in queues.values()) + remaining,
        slo_deviation=pacer.slo.deviation(now),
        busy_share=core.books.busy.share(now),
    )
    return {
        **Status(enabled=True, version=__version__, load=load).as_dict(),
        "config": config.as_dict(),
        "queues": queues,
        "parked": None if not every else _progress(every[0], now),
        "in_progress": len(every),
        "slices": {
            "on": laps.cutter is not None,
            "why_not": laps.whole,
            "launch_ms": 1e3 * pacer.sizes.launch_s,
        },
        **pacer.status(now),
        "totals": {cls.value: asdict(total) for cls, total in core.totals.items()},
        "graphs": graphs.status(scheduler.tp_worker.model_runner),
        "uptime_s": now - core.started_s,
    }


def _progress(req: Req, now: float) -> dict[str, Any]:
    return {
        "rid": req.rid,
        "done_tokens": req.prefix_len,
        "total_tokens": req.seqlen,
        "parked_s": now - req.laps_tag.chunk_s,
    }


def _queue(tags: list[Tag], now: float) -> dict[str, Any]:
    return {
        "depth": len(tags),
        "waiting_tokens": sum(t.new_tokens for t in tags),
        "oldest_wait_s": max((now - t.since for t in tags), default=0.0),
    }
