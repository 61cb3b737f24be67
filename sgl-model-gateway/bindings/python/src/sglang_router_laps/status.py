"""``GET /laps_status``: everything an operator can ask of the router, as one JSON object."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from laps_core.pools.pressure import POOLS, pressure
from sglang_laps import __version__

from .instances import Instance
from .signals import SignalReader

if TYPE_CHECKING:
    from .balancer import LapsMiniLoadBalancer


def status(lb: LapsMiniLoadBalancer, *, history: int = 0) -> dict[str, Any]:
    """The state now, and the last ``history`` samples of what went before. Times are seconds since 1970."""
    controller = lb.control.controller
    result: dict[str, Any] = {
        "enabled": True,
        "version": __version__,
        "at": round(time.time(), 3),
        "uptime_s": round(time.monotonic() - lb.started_at, 1),
        "pools": {p: [i.url for i in lb.pools.members(p)] for p in POOLS},
        "pressure": {p: round(controller.raw[p], 4) for p in POOLS},
        "balance": round(controller.balance, 4),
        "in_dead_band": controller.in_dead_band(),
        "prefill": [_prefill(r, lb) for r in lb.readers],
        "decode": [_instance(i) for i in lb.decoders],
        "in_flight": lb.in_flight,
        "max_inflight": lb.max_inflight,
        "tasks": [asdict(w) for w in lb.supervisor.watched],
        "counts": lb.counts.as_dict(),
        "ttft_ms": lb.ttft.quantiles_ms(time.monotonic()),
        "migrations": [
            {"at": round(m.at, 3), "instance": m.move.name, "from": m.move.source, "to": m.move.target,
             "reason": m.move.reason}
            for m in reversed(lb.control.moves)
        ],
        "tokens": lb.counter.as_dict(),
        "config": lb.config.as_dict(),
    }  # fmt: skip
    if history:
        result["history"] = list(lb.control.history)[-history:]
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
    }


def _prefill(r: SignalReader, lb: LapsMiniLoadBalancer) -> dict[str, Any]:
    i = r.instance
    return {
        **_instance(i),
        "pool": i.pool,
        "pressure": round(pressure(r.signals(), lb.config.pressure), 4),
        "signals": {
            "backlog_tokens": round(r.load.backlog_tokens),
            "slo_deviation": round(r.load.slo_deviation, 4),
            "busy_share": round(r.load.busy_share, 4),
            "source": r.load.source,
        },
        "prefix_blocks": len(i.prefixes),
    }
