"""One row for each server, and the slowest requests of all, from the servers' answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from laps_core.length import CLASSES

from laps_top.ask import Answer, Seen


class Quantiles(msgspec.Struct, frozen=True):
    """Median and P90 of times to first token (milliseconds); None = no request."""

    p50: float | None = None
    p90: float | None = None


class Row(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Row of one server; None = the server does not report the value."""

    url: str
    kind: str = ""
    """prefill or router; empty if the server has not answered."""
    error: str = ""
    """Reason why the server has not answered, or why LAPS is off."""
    waiting: dict[str, int] = {}
    """Number of waiting requests by class; at a router the total, as "all"."""
    oldest_wait_s: float | None = None
    busy_share: float | None = None
    """Busy share (0..1); for a router the mean of its prefill servers."""
    ttft_ms: dict[str, Quantiles] = {}
    """By class: over the last 30 s for a prefill server, from the status for a router."""
    preemptions: int | None = None
    model_error: float | None = None
    """Median of the latency model's relative error."""
    kv_tokens: int | None = None
    """Capacity of a prefill server's prefix cache (tokens); for a router tokens held by its decode servers."""


class Slow(msgspec.Struct, frozen=True, kw_only=True):
    """One of the slowest requests of the last 30 s."""

    url: str
    rid: str
    cls: str = msgspec.field(name="class")
    ttft_ms: float
    mostly: str
    """Cause with the longest time, and its share."""
    behind: str = ""
    """Request that used the device longest while this request waited."""


class Table(msgspec.Struct, frozen=True):
    """All data that is shown."""

    servers: list[Row]
    slowest: list[Slow]


def _at(status: Any, *path: str) -> Any:
    """Return the entry of a status under these keys; None if there is no entry."""
    for key in path:
        status = status.get(key) if isinstance(status, Mapping) else None
    return status


def _sum(values: Iterable[Any]) -> Any:
    """Return the sum of the numbers; None if there are no numbers."""
    numbers = [v for v in values if isinstance(v, int | float)]
    return sum(numbers) if numbers else None


def quantiles(times: Iterable[float]) -> Quantiles:
    """Return median and P90."""
    known = sorted(times)
    if not known:
        return Quantiles()
    p50, p90 = (known[min(len(known) - 1, int(q * len(known)))] for q in (0.5, 0.9))
    return Quantiles(p50, p90)


def row(url: str, answer: Answer) -> Row:
    status = answer.status
    if status is None:
        return Row(url=url, error=answer.error or "no answer")
    try:
        found = _router(url, status) if "prefill" in status else _prefill(url, status, answer.recent)
        # Values of another type would end the view of all servers.
        return msgspec.convert(msgspec.to_builtins(found), Row)
    except (AttributeError, TypeError, ValueError):
        return Row(url=url, error="no status of LAPS")


def _prefill(url: str, status: Mapping[str, Any], recent: Sequence[Seen] | None) -> Row:
    if not status.get("enabled"):
        return Row(url=url, kind="prefill", error=f"LAPS is off: {status.get('reason') or 'no reason given'}")
    waiting = {c: _at(status, "queues", c, "depth") for c in CLASSES}
    oldest = [_at(status, "queues", c, "oldest_wait_s") for c in CLASSES]
    ranks = status.get("ranks") or [status]
    counts = [_at(r, "preemption", key) for r in ranks for key in ("by_short_batches", "by_smaller_prompts")]
    return Row(
        url=url,
        kind="prefill",
        waiting={c: n for c, n in waiting.items() if n is not None},
        oldest_wait_s=max((w for w in oldest if w is not None), default=None),
        busy_share=_at(status, "load", "busy_share"),
        ttft_ms={} if recent is None else {c: quantiles(r.ttft_ms for r in recent if r.cls == c) for c in CLASSES},
        preemptions=_sum(counts),
        model_error=_at(status, "latency_model", "error", "median"),
        kv_tokens=status.get("holds"),
    )


def _router(url: str, status: Mapping[str, Any]) -> Row:
    busy = [b for p in status["prefill"] if (b := _at(p, "signals", "busy_share")) is not None]
    queued = status.get("queued")
    return Row(
        url=url,
        kind="router",
        waiting={} if queued is None else {"all": queued},
        oldest_wait_s=status.get("oldest_queued_s"),
        busy_share=sum(busy) / len(busy) if busy else None,
        ttft_ms={c: Quantiles(*(_at(status, "ttft_ms", c, q) for q in ("p50", "p90"))) for c in CLASSES},
        kv_tokens=_sum(_at(d, "kv_tokens", "held") for d in status.get("decode", ())),
    )


def table(answers: Mapping[str, Answer], slowest: int) -> Table:
    """Return the rows of all servers, and of their `slowest` recent requests. `answers`: by URL."""
    found = [_slow(url, r) for url, answer in answers.items() for r in answer.recent or ()]
    found.sort(key=lambda s: -s.ttft_ms)
    return Table([row(url, answer) for url, answer in answers.items()], found[:slowest])


def _slow(url: str, receipt: Seen) -> Slow:
    causes: Sequence[tuple[str, float]] = sorted(receipt.causes.items(), key=lambda item: -item[1])
    name, ms = causes[0] if causes else ("unknown", receipt.ttft_ms)
    share = ms / receipt.ttft_ms if receipt.ttft_ms > 0 else 0.0
    return Slow(
        url=url,
        rid=receipt.rid,
        cls=receipt.cls,
        ttft_ms=receipt.ttft_ms,
        mostly=f"{name.replace('_', ' ')} {share:.0%}",
        behind=receipt.behind[0].rid if receipt.behind else "",
    )
