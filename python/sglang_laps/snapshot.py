"""What one scheduler is doing, JSON-ready. Asking changes nothing: ranks are asked at different moments, or only one
is, and must not part by it."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from laps_core.length import LengthClass, classify
from laps_core.protocol import Load, Status
from laps_core.scheduling.queues import split

from sglang_laps import __version__, graphs
from sglang_laps.classes import Tag

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

    from sglang_laps.scheduler import LapsPrefillMixin


def snapshot(me: LapsPrefillMixin) -> dict[str, Any]:
    """Of a scheduler with LAPS. Times in seconds, lengths in tokens."""
    config = me.laps_config.as_dict()
    if not me.laps_on:
        head = Status(enabled=False, version=__version__).as_dict()
        return {**head, "reason": me._laps_off_reason, "config": config}
    now = time.perf_counter()
    classes, books = me._laps_classes, me._laps_books
    tags = [classes.tag_of(r, now) for r in me.waiting_queue]
    views = split(tags, lambda tag: classify(tag.new_tokens, classes.threshold))
    queues = {cls.value: _queue(views.of(cls), now) for cls in LengthClass}
    every = [*([] if me.chunked_req is None else [me.chunked_req]), *me._laps_parked]
    remaining = sum(max(0, r.seqlen - r.prefix_len) for r in every)
    load = Load(
        backlog_tokens=sum(q["waiting_tokens"] for q in queues.values()) + remaining,
        slo_deviation=me._laps_pacer.slo.deviation(now),
        busy_share=books.busy.share(now),
    )
    return {
        **Status(enabled=True, version=__version__, load=load).as_dict(),
        "config": config,
        "queues": queues,
        "parked": None if not every else _progress(every[0], now),
        "in_progress": len(every),
        "slices": {
            "on": me._laps_slices is not None,
            "why_not": me._laps_whole,
            "launch_ms": 1e3 * me._laps_pacer.launch_s,
        },
        **me._laps_pacer.status(now),
        "totals": {cls.value: asdict(total) for cls, total in books.totals.items()},
        "graphs": graphs.status(me.tp_worker.model_runner),
        "uptime_s": now - me._laps_started,
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
