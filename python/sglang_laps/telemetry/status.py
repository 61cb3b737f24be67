"""Status of the LAPS scheduler of a server: a snapshot of each rank, reported over HTTP and as Prometheus series.

A query changes no state: ranks are asked at different moments, or only one rank is asked, and all must stay alike.

A new figure: compute it in ``snapshot``, define in ``merge`` how ranks add up, and name its series in ``_GAUGES`` or
``_COUNTERS``. A new counter by class: add a field to ``flights.Totals`` and count it in ``LapsCore.record_result``; the
status then has it. Test it in test_core.py. Document keys and series in docs/LAPS.md; no test checks this. Figures of
the router: its ``telemetry``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from laps_core import __version__
from laps_core.config import LapsConfig
from laps_core.latency.step import Coefficients
from laps_core.protocol import ByClass, Lengths, Load, Status, read_status
from msgspec import structs

from sglang_laps import graphs
from sglang_laps.classes import Tag
from sglang_laps.core import LapsCore
from sglang_laps.flights import Totals
from sglang_laps.telemetry.quotes import QuotedCore

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler


PERIOD_S = 0.5
"""Least time between two updates of the Prometheus gauges (seconds)."""
SHARE = 0.02
"""Most of a scheduler's time that these updates may take."""


def off(config: LapsConfig, reason: str | None) -> dict[str, Any]:
    """Return the status of a scheduler that LAPS leaves alone, with the reason."""
    return {**Status(enabled=False, version=__version__).as_dict(), "reason": reason, "config": config.as_dict()}


def snapshot(scheduler: Scheduler, config: LapsConfig, core: LapsCore, slices: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of a scheduler with LAPS. Times in seconds, lengths in tokens. `slices`: state at start."""
    now = time.perf_counter()
    pacer = core.pacer
    seen = core.classes.seen(scheduler.waiting_queue, now)
    queues = {cls: _queue(tags, now) for cls, tags in seen.items()}
    every = core.chunked.in_progress(scheduler.chunked_req).reqs
    remaining = sum(max(0, r.seqlen - r.prefix_len) for r in every)
    model = pacer.model.coefficients
    load = Load(
        backlog_tokens=sum(q["waiting_tokens"] for q in queues.values()) + remaining,
        slo_deviation=pacer.slo.deviation(now),
        busy_share=pacer.busy.share(now),
        backlog_s=None if model is None else _backlog_s(model, seen, every),
        busy_s=ByClass(short=core.totals["short"].busy_s, long=core.totals["long"].busy_s),
    )
    lengths = core.classes.lengths.to_lengths(now - core.started_s)
    return {
        **Status(
            enabled=True,
            version=__version__,
            load=load,
            lengths=lengths,
            model=model,
            longest=int(scheduler.max_req_input_len) - 1,
            holds=_holds(scheduler),
        ).as_dict(),
        "config": config.as_dict(),
        "queues": queues,
        "parked": None if not every else _progress(every[0], now),
        "in_progress": len(every),
        "overlap": bool(scheduler.enable_overlap),
        "slices": {**slices, "launch_ms": 1e3 * pacer.sizes.launch_s, "pause_ms": 1e3 * pacer.sizes.pause_s},
        **pacer.status(now),
        **({} if core.decode is None else {"decode": {**core.decode.status(), "abandoned_passes": core.abandoned}}),
        **(core.quotes(now) if isinstance(core, QuotedCore) else {}),
        "totals": {cls: asdict(total) for cls, total in core.totals.items()},
        "graphs": graphs.status(scheduler.tp_worker.model_runner),
        "uptime_s": now - core.started_s,
    }


def _holds(scheduler: Scheduler) -> int:
    """Return the number of tokens that the prefix cache can hold, on the device and on the host."""
    cache = scheduler.tree_cache
    if getattr(cache, "disable", False):
        return 0
    host = getattr(cache, "token_to_kv_pool_host", None) or getattr(cache, "full_kv_pool_host", None)
    return int(scheduler.max_total_num_tokens) + (int(host.logical_size) if host is not None else 0)


def _progress(req: Req, now: float) -> dict[str, Any]:
    return {
        "rid": req.rid,
        "done_tokens": req.prefix_len,
        "total_tokens": req.seqlen,
        "parked_s": now - req.laps_tag.chunk_s,
    }


def _backlog_s(model: Coefficients, waiting: Mapping[str, list[Tag]], in_progress: Sequence[Req]) -> ByClass:
    work = {cls: sum(model.work_s(t.new_tokens, t.history) for t in tags) for cls, tags in waiting.items()}
    begun = sum(model.work_s(max(0, r.seqlen - r.prefix_len), r.prefix_len) for r in in_progress)
    return ByClass(short=work["short"], long=work["long"] + begun)


def _queue(tags: list[Tag], now: float) -> dict[str, Any]:
    return {
        "depth": len(tags),
        "waiting_tokens": sum(t.new_tokens for t in tags),
        "oldest_wait_s": max((now - t.since for t in tags), default=0.0),
    }


def merge(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merge the statuses of the data-parallel ranks into one."""
    if not ranks:
        return Status(enabled=False, version=__version__).as_dict()
    # Ranks answer in any order.
    ranks = sorted(ranks, key=lambda r: r.get("dp_rank", 0))
    first = dict(ranks[0])
    head = read_status(first)
    if len(ranks) == 1 or not head.enabled:
        return first
    said = [read_status(r) for r in ranks]
    load = Load.of_ranks([s.load for s in said if s.load is not None])
    counted = [s.lengths for s in said if s.lengths is not None]
    lengths = Lengths.of_ranks(counted) if counted else None
    merged = structs.replace(head, load=load, lengths=lengths)
    first.update(merged.as_dict())
    for part in ("queues", "totals"):
        first[part] = {cls: _add_or_max([r[part][cls] for r in ranks]) for cls in first[part]}
    if "decode" in first:
        first["decode"] = _decode([r["decode"] for r in ranks])
    first["ranks"] = ranks
    return first


def _add_or_max(entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {key: (max if key.startswith("oldest") else sum)(e[key] for e in entries) for key in entries[0]}


def _decode(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the sum of the ranks' counters; times are those of the slowest rank."""

    def worst(values: list[Any]) -> Any:
        return max((v for v in values if v is not None), default=None)

    counters = [path.removeprefix("decode.") for path, *_ in _COUNTERS if path.startswith("decode.")]
    counts = {key: sum(r[key] for r in ranks) for key in ("streams", *counters)}
    slowest = {key: worst([r[key] for r in ranks]) for key in ("target_ms", "step_ms")}
    tbt_ms = {name: worst([r["tbt_ms"][name] for r in ranks]) for name in ranks[0]["tbt_ms"]}
    return {**slowest, **counts, "tbt_ms": tbt_ms}


_GAUGES = (
    ("queues.*.depth", 1.0, "queue_depth", "Waiting requests."),
    ("queues.*.waiting_tokens", 1.0, "queue_tokens", "Waiting new tokens."),
    ("queues.*.oldest_wait_s", 1.0, "queue_oldest_wait_seconds", "Age of the oldest waiting request."),
    ("fairness.credit_s", 1.0, "long_credit_seconds", "Device time that the long prompt waiting longest is owed."),
    ("in_progress", 1.0, "parked", "Long prompts between two of their chunks."),
    ("threshold.tokens", 1.0, "length_threshold_tokens", "Longest short request."),
    ("load.busy_share", 1.0, "busy_share", "Share of the last seconds the device was busy."),
    ("quotes.typical.*.ttft_ms", 1e3, "quote_seconds", "Quoted time to first token of a median request."),
    ("quotes.typical.*.high_ms", 1e3, "quote_high_seconds",
     "Quoted time to first token that one request in ten exceeds."),
    ("group.steps", 1.0, "group_steps", "Steps that the data-parallel attention ranks have planned together."),
    ("group.preemptions", 1.0, "group_preemptions", "Those of them that preempted another."),
    ("group.budget_s", 1.0, "group_budget_seconds", "Predicted time of the last such step."),
    ("group.waiting_share", 1.0, "group_waiting_share", "Share of rank-time spent waiting for the slowest rank."),
    ("decode.tbt_ms.p50", 1e3, "decode_tbt_p50_seconds", "Median of the latest times between tokens."),
    ("decode.tbt_ms.p99", 1e3, "decode_tbt_p99_seconds", "99th percentile of the latest times between tokens."),
    ("decode.tbt_ms.longest", 1e3, "decode_tbt_longest_seconds", "Longest of the latest times between tokens."),
    ("decode.target_ms", 1e3, "decode_target_seconds", "Target for the time between tokens."),
    ("decode.step_ms", 1e3, "decode_step_seconds", "Median device time of the latest decode steps."),
    ("decode.streams", 1.0, "decode_streams", "Requests that are decoded."),
)  # fmt: skip
"""Gauges: path in the snapshot (`*`: the class), divisor, name, help."""
_COUNTERS = (
    ("totals.*.batches", "batches", "Prefill batches."),
    ("totals.*.requests", "requests", "Requests prefilled (chunks of one count once each)."),
    ("totals.*.tokens", "tokens", "New tokens prefilled."),
    ("totals.*.busy_s", "busy_s", "Device seconds."),
    ("quotes.outcomes.*.*", "quote_outcomes", "First tokens inside, below and above their quoted interval."),
    ("quotes.beyond_bound", "quote_beyond_bound", "First tokens that came later than the bound they were quoted."),
    ("decode.steps", "decode_steps", "Decode steps."),
    ("decode.steps_in_pauses", "decode_steps_in_pauses", "Decode steps in pauses of a prefill batch."),
    ("decode.steps_carried", "decode_steps_carried", "Decode steps that ran as rows of a prefill batch."),
    ("decode.busy_s", "decode_busy_s", "Device seconds of the other decode steps."),
    ("decode.abandoned_passes", "abandoned_passes",
     "Prefill batches that ended in a pause: all of their requests were aborted."),
)  # fmt: skip
"""Counters: path in the snapshot (`*`: the class, then the side of the quoted interval), name, help."""
KEYS = ("class", "side")
"""Labels for the stars of a path."""


class Series:
    """The snapshot as Prometheus series, in the registry that SGLang's --enable-metrics serves."""

    def __init__(
        self, labels: dict[str, str], emulated: Mapping[str, str] | None = None, *, without: Collection[str] = ()
    ) -> None:
        """`labels`: labels of every series, except those named in KEYS. `emulated`: labels of an emulated device; empty
        for a real device. `without`: entries of the snapshot of which this server has no series."""
        # SGLang sets PROMETHEUS_MULTIPROC_DIR first; prometheus_client reads it when imported.
        from prometheus_client import Counter, Gauge

        gauge = partial(Gauge, multiprocess_mode="mostrecent")
        labels = {name: value for name, value in labels.items() if name not in KEYS}

        def series(kind: Callable[..., Any], path: str, name: str, text: str) -> Any:
            return kind(f"sglang:laps_{name}", text, [*labels, *KEYS[: path.count("*")]])

        def kept(path: str) -> bool:
            return path.partition(".")[0] not in without

        self._values = list(labels.values())
        self._tells_s = -math.inf
        self._gauges = [(path, unit, series(gauge, path, *how)) for path, unit, *how in _GAUGES if kept(path)]
        self._counters = [(path, series(Counter, path, *how)) for path, *how in _COUNTERS if kept(path)]
        self._counted: dict[tuple[str, ...], float] = {}
        if emulated:
            text, info = "Step times are of this profile, not of this machine.", {**labels, **emulated}
            gauge("sglang:laps_emulated_info", text, list(info)).labels(**info).set(1)

    def update(self, now: float, status: Callable[[], dict[str, Any]], totals: Mapping[str, Totals]) -> None:
        """Advance the counters of each class to `totals`; update all series if PERIOD_S has passed since the last
        time, or more if many requests wait: then a snapshot takes long."""
        self._count({"totals": {cls: asdict(total) for cls, total in totals.items()}})
        if now >= self._tells_s:
            begin = time.perf_counter()
            self.show(status())
            self._tells_s = now + max(PERIOD_S, (time.perf_counter() - begin) / SHARE)

    def show(self, status: dict[str, Any]) -> None:
        """Set the gauges and advance the counters to a snapshot, or to some entries of one."""
        self._count(status)
        for path, unit, gauge in self._gauges:
            for keys, value in _found(status, path):
                gauge.labels(*self._values, *keys).set(value / unit)

    def _count(self, status: dict[str, Any]) -> None:
        for path, counter in self._counters:
            for keys, value in _found(status, path):
                counter.labels(*self._values, *keys).inc(value - self._counted.get((path, *keys), 0.0))
                self._counted[path, *keys] = value


def _found(status: dict[str, Any], path: str) -> Iterator[tuple[tuple[str, ...], float]]:
    """Yield the values at `path`, each with the keys in place of its stars; none for a value that is None."""

    def inside(entry: Any, parts: Sequence[str], *keys: str) -> Iterator[tuple[tuple[str, ...], float]]:
        if entry is None:
            return
        if not parts:
            yield keys, entry
        elif parts[0] != "*":
            yield from inside(entry[parts[0]], parts[1:], *keys)
        else:
            for key, one in entry.items():
                yield from inside(one, parts[1:], *keys, key)

    first, *rest = path.split(".")
    return inside(status.get(first), rest)
