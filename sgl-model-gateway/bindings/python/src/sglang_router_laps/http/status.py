"""``GET /laps_status`` and ``GET /metrics``: the router's state, read when requested."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, fields
from typing import Any

from laps_core import __version__
from laps_core.pools.decode import DecodeInstance
from laps_core.pools.instances import Instance
from laps_core.pools.prefill import Place
from laps_core.pools.pressure import BOTH, POOLS, pressure
from laps_core.protocol import Status
from msgspec import to_builtins
from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily

from ..router import Router
from ..servers.signals import SignalReader
from ..telemetry import PREFIX, Counts

Rows = list[Any]
"""Label values and the value of each sample."""
ANSWERS = "Time to a server's answers: a prefill server since the request was sent, a decode server since its prefill"
BREAKER = ("closed", "half_open", "open")


def status(router: Router, *, history: int = 0) -> dict[str, Any]:
    """Return the current state and the last ``history`` samples, JSON-ready. Timestamps are seconds since 1970."""
    controller = router.control.controller
    uptime_s = round(time.monotonic() - router.started_at, 1)
    result: dict[str, Any] = {
        **Status(enabled=True, version=__version__, lengths=router.journal.lengths.to_lengths(uptime_s)).as_dict(),
        "at": round(time.time(), 3),
        "uptime_s": uptime_s,
        "pools": {p: [i.url for i in router.pools.members(p)] for p in POOLS},
        "pressure": {p: round(controller.raw[p], 4) for p in POOLS},
        "balance": round(controller.balance, 4),
        "in_dead_band": controller.in_dead_band(),
        "need": {p: round(n, 2) for p, n in zip(POOLS, controller.need, strict=True)},
        "prefill": [_prefill(r, router) for r in router.readers],
        "decode": [_decode(i, router.pools.traffic_ratio) for i in router.decoders],
        "draining": [{"role": i.role, **_instance(i)} for i in router.members.draining],
        "in_flight": router.queue.in_flight,
        "max_inflight": router.queue.max_in_flight,
        "queued": router.queue.waiting,
        "max_queued": router.queue.max_queued,
        "oldest_queued_s": round(router.queue.oldest_s(), 3),
        "ready": router.ready(),
        "tasks": [asdict(w) for w in router.tasks.watched],
        "counts": asdict(router.counts),
        "ttft_ms": router.journal.ttft_ms(),
        "migrations": list(router.journal.moves),
        "tokens": router.counter.as_dict(),
        "config": asdict(router.config),
    }
    if history:
        result["history"] = list(router.journal.samples)[-history:]
    return result


def _instance(i: Instance) -> dict[str, Any]:
    return {
        "url": i.url,
        "healthy": i.healthy,
        "breaker": i.breaker.state,
        "outstanding_requests": i.outstanding,
        "outstanding_tokens": i.outstanding_tokens,
        "served": i.served,
        "lost": i.lost,
        "errors": i.errors,
        "answers": i.answers,
        "answers_s": round(i.answers_s, 4),
        "latency_ms": None if i.latency_s is None else round(1e3 * i.latency_s, 3),
    }


def _prefill(r: SignalReader, router: Router) -> dict[str, Any]:
    i = r.instance
    return {
        **_instance(i),
        "pool": i.pool,
        "pressure": round(pressure(r.signals(), router.config), 4),
        "signals": {**r.load.rounded(), "source": r.source},
        "prefix_blocks": i.prefix_blocks,
        **({"ranks": [_rank(p, i.clock()) for p in i.places]} if len(i.places) > 1 else {}),
        **({} if r.group is None else {"group": to_builtins(r.group)}),
    }


def _rank(p: Place, now: float) -> dict[str, Any]:
    return {
        "outstanding_requests": p.outstanding,
        "outstanding_tokens": p.outstanding_tokens,
        "served_tokens": p.served_tokens,
        "waiting_s": round(sum(p.outlook.waiting(now)), 4),
        "prefix_blocks": len(p.prefixes),
    }


def _decode(i: DecodeInstance, traffic_ratio: float) -> dict[str, Any]:
    kv = i.kv
    held = {"held": round(i.held(traffic_ratio)), "told": kv and kv.reported, "capacity": kv and kv.capacity}
    return {**_instance(i), "kv_tokens": held}


class Metrics:
    """The status as Prometheus metrics, together with the recorded histograms."""

    def __init__(self, router: Router) -> None:
        self._router = router
        router.journal.registry.register(self)

    def text(self) -> bytes:
        """Return the metrics in the format of CONTENT_TYPE_LATEST."""
        return generate_latest(self._router.journal.registry)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics; prometheus_client calls this at each scrape."""
        now = status(self._router)
        for f in fields(Counts):
            n, said = now["counts"][f.name], f.metadata
            rows: Rows = [((k,), v) for k, v in n.items()] if said["label"] else [((), n)]
            yield _family(CounterMetricFamily, said["name"] or f.name, said["text"], said["label"], rows)
        tasks = [((t["name"],), t) for t in now["tasks"]]
        again = "Restarts after a failure"
        yield _family(CounterMetricFamily, "task_restarts", again, "task", _column(tasks, "restarts"))
        both = [((s["url"], role), s) for role in ("prefill", "decode") for s in now[role]]
        prefills = [((s["url"], s["pool"]), s) for s in now["prefill"]]
        sizes = {p: sum(s["healthy"] for (_, pool), s in prefills if pool in (p, BOTH)) for p in POOLS}
        for key, text in (("lost", "Requests lost with their connection to a server"), ("errors", "5xx and time-outs")):
            yield _family(CounterMetricFamily, f"server_{key}", text, "server role", _column(both, key))
        took = SummaryMetricFamily(f"{PREFIX}server_answer_seconds", ANSWERS, labels=("server", "role"))
        for k, s in both:
            took.add_metric(k, s["answers"], s["answers_s"])
        yield took
        states = [(k, BREAKER.index(s["breaker"])) for k, s in both]
        backlogs = [(k, s["signals"]["backlog_tokens"]) for k, s in prefills]
        ranks = [((s["url"], str(n)), r) for s in now["prefill"] for n, r in enumerate(s.get("ranks", ()))]
        groups = [((s["url"],), s["group"]) for s in now["prefill"] if s.get("group", {}).get("steps")]
        kv = [((s["url"],), s["kv_tokens"]) for s in now["decode"]]
        sized = [(k, s) for k, s in kv if s["capacity"] is not None]
        gauges: tuple[tuple[str, str, str, Rows], ...] = (
            ("in_flight", "Requests in flight", "", [((), now["in_flight"])]),
            ("queued", "Requests that wait in the queue", "", [((), now["queued"])]),
            ("ready", "1 while /readiness says so", "", [((), now["ready"])]),
            ("instance_up", "1 if healthy", "server role", _column(both, "healthy")),
            ("outstanding_requests", "Requests in flight", "server role", _column(both, "outstanding_requests")),
            ("outstanding_tokens", "New tokens in flight", "server role", _column(both, "outstanding_tokens")),
            ("breaker_state", "Circuit breaker of a server: 0 closed, 1 half open, 2 open", "server role", states),
            ("instance_pressure", "Pressure of an instance", "server pool", _column(prefills, "pressure")),
            ("backlog_tokens", "New tokens waiting", "server pool", backlogs),
            ("rank_outstanding_tokens", "New tokens in flight", "server rank", _column(ranks, "outstanding_tokens")),
            ("rank_waiting_seconds", "Work that waits at a DP rank", "server rank", _column(ranks, "waiting_s")),
            ("group_steps", "Steps that attention ranks planned together", "server", _column(groups, "steps")),
            ("group_budget_seconds", "Predicted time of the last such step", "server", _column(groups, "budget_s")),
            ("group_waiting_share", "Share of rank time spent waiting", "server", _column(groups, "waiting_share")),
            ("kv_held_tokens", "KV tokens held or requested, by all routers", "server", _column(kv, "held")),
            ("kv_capacity_tokens", "KV tokens that a decode server can hold", "server", _column(sized, "capacity")),
            ("draining", "Draining servers", "", [((), len(now["draining"]))]),
            ("pool_instances", "Healthy instances of a pool", "pool", [((p,), n) for p, n in sizes.items()]),
            ("pool_pressure", "P90 pressure of a pool", "pool", [((p,), x) for p, x in now["pressure"].items()]),
            ("task_up", "1 while a watcher or the controller runs", "task", _column(tasks, "alive")),
        )
        for name, text, labels, rows in gauges:
            yield _family(GaugeMetricFamily, name, text, labels, rows)


def _column(rows: Iterable[tuple[tuple[str, ...], dict[str, Any]]], key: str) -> Rows:
    return [(k, row[key]) for k, row in rows]


def _family(
    kind: type[CounterMetricFamily | GaugeMetricFamily], name: str, text: str, labels: str, rows: Rows
) -> Metric:
    metric = kind(f"{PREFIX}{name}", text, labels=labels.split())
    for values, number in rows:
        metric.add_metric(values, number)
    return metric
