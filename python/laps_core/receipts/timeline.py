"""Chrome trace events of the last seconds of schedulers, for Perfetto and chrome://tracing."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from laps_core.length import CLASSES, ClassName
from laps_core.receipts.extract import Extract
from laps_core.receipts.run import Hold, Run

DEVICE = 1
"""Lane of the device; the lanes of the classes that are held back follow."""
NAMED = 16
"""Most requests of a batch that are named."""
Event = dict[str, Any]


def trace(extracts: Sequence[Extract]) -> dict[str, Any]:
    """Return the trace of the ranks of a server (JSON-ready). Times are microseconds since the first extract began."""
    base_us = min((round(x.epoch_s * 1e6) + x.begin_us for x in extracts), default=0)
    return {
        "displayTimeUnit": "ms",
        "otherData": {"begins_unix_s": base_us / 1e6},
        "traceEvents": [event for x in extracts for event in events(x, base_us)],
    }


def events(x: Extract, base_us: int = 0) -> Iterator[Event]:
    """Yield the events of one rank. `base_us`: Unix time of 0 in the trace (microseconds)."""
    pid, shift = x.dp_rank + 1, round(x.epoch_s * 1e6) - base_us
    lanes = {DEVICE: "device", **{DEVICE + 1 + i: f"{cls} held back" for i, cls in enumerate(CLASSES)}}
    yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": f"data-parallel rank {x.dp_rank}"}}
    for tid, name in lanes.items():
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}
    found = [*_device(x), *_held(x), *_requests(x)]
    for event in sorted(found, key=lambda e: (e["ts"], -e.get("dur", 0))):
        yield {**event, "ts": event["ts"] + shift, "pid": pid, "tid": event.get("tid", 0)}


def _complete(tid: int, name: str, begin_us: int, end_us: int, **args: Any) -> Event:
    return {"ph": "X", "tid": tid, "name": name, "ts": begin_us, "dur": end_us - begin_us, "args": args}


# -- the device


def _device(x: Extract) -> Iterator[Event]:
    """Yield batches, decode steps and idle time. A preempting batch or step lies within the paused batch."""
    spans = [(x.end_us, x.begin_us)] * len(x.runs)
    counts = [0] * len(x.runs)
    for begin, end, of in x.pieces:
        if of < 0:
            yield from _idle(x, begin, end)
            continue
        spans[of] = min(spans[of][0], begin), max(spans[of][1], end)
        counts[of] += 1
    paused: list[int] = []
    ends: dict[int, int] = {}
    for i in sorted(range(len(x.runs)), key=lambda i: (spans[i][0], -spans[i][1])):
        begin, end = spans[i]
        while paused and ends[paused[-1]] <= begin:
            paused.pop()
        end = ends[i] = min([end, *(ends[below] for below in paused[-1:])])
        paused.append(i)
        if end > begin:
            yield from _run(x.runs[i], begin, end)
    for begin, end, of in x.pieces:
        if of >= 0 and counts[of] > 1:
            yield _complete(DEVICE, "slice", begin, min(end, ends[of]))


def _run(run: Run, begin: int, end: int) -> Iterator[Event]:
    what = run.cls or "decode step"
    args: dict[str, Any] = {
        "requests": list(run.rids[:NAMED]),
        "request_count": run.request_count,
        "new_tokens": run.new_tokens,
        "predicted_ms": None if run.predicted_us is None else run.predicted_us / 1e3,
        "measured_ms": None if run.end_us is None else run.own_us / 1e3,
        "preempts": run.depth > 0,
        "late": run.late,
    }
    args.update({} if run.cut is None else {"goes_on": run.cut})
    args.update({"streams": run.streams} if run.streams else {})
    args.update({"layers_per_slice": run.layers} if run.layers else {})
    size = f"{run.streams} streams" if run.cls is None else f"{run.request_count} x, {run.new_tokens} tokens"
    yield _complete(DEVICE, f"{what}: {size}", begin, end, **args)
    if run.late:
        late = {"predicted_ms": args["predicted_ms"], "measured_ms": args["measured_ms"]}
        yield {"ph": "i", "tid": DEVICE, "name": "late step", "ts": end, "s": "t", "args": late}


def _idle(x: Extract, begin: int, end: int) -> Iterator[Event]:
    """Yield idle time, with the reason."""
    changes = {h.since_us for cls in CLASSES for h in x.held[cls] if begin < h.since_us < end}
    for a, b in pairwise([begin, *sorted(changes), end]):
        now = [_at(x.held[cls], a) for cls in CLASSES]
        cause = next((h.cause for h in now if h.cause), "scheduling" if any(h.waits for h in now) else None)
        yield _complete(DEVICE, f"idle: {cause}" if cause else "idle", a, b)


def _at(held: Sequence[Hold], at_us: int) -> Hold:
    return held[max(0, bisect_right(held, at_us, key=lambda h: h.since_us) - 1)]


# -- waiting requests


def _held(x: Extract) -> Iterator[Event]:
    """Yield the causes that held each class back."""
    for i, cls in enumerate(CLASSES):
        known = [*x.held[cls], Hold(x.end_us, None, False)]
        for h, later in pairwise(known):
            begin, end = max(h.since_us, x.begin_us), min(later.since_us, x.end_us)
            if h.cause is not None and end > begin:
                yield _complete(DEVICE + 1 + i, h.cause, begin, end)


def _requests(x: Extract) -> Iterator[Event]:
    """Yield spans of each request: waiting, prefill, and transfer to its decode server."""
    for n, e in enumerate(x.entries):
        args = {"rid": e.rid, "new_tokens": e.new_tokens, "aborted": e.aborted}
        yield from _span(n, e.cls, f"{e.cls} request of {e.new_tokens} tokens", e.arrived_us, e.end_us, args)
        yield from _span(n, e.cls, "waits", e.arrived_us, e.end_us if e.first_us is None else e.first_us)
        if e.first_us is not None and e.last_us is not None:
            yield from _span(n, e.cls, "prefill in progress", e.first_us, e.last_us)
            if e.transferred_us is not None:
                yield from _span(n, e.cls, "transfer", e.last_us, e.transferred_us)


def _span(
    number: int, cls: ClassName, name: str, begin: int, end: int, args: dict[str, Any] | None = None
) -> Iterator[Event]:
    """Yield the start and end events of a span that other spans can overlap."""
    both = {"cat": f"{cls} requests", "id": number, "name": name}
    yield {**both, "ph": "b", "ts": begin, "args": args or {}}
    yield {**both, "ph": "e", "ts": max(begin, end), "args": {}}
