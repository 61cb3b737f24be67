"""``GET /laps_status``: everything an operator can ask of the router, as one JSON object."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from laps_core.pools.pressure import POOLS, pressure
from sglang_laps import __version__

from ..router import Router
from ..servers.instances import Instance
from ..servers.signals import SignalReader

PAGE = Path(__file__).parent / "page" / "index.html"
"""Shows the status as it changes."""


def status(router: Router, *, history: int = 0) -> dict[str, Any]:
    """The state now, and the last ``history`` samples of what went before. Times are seconds since 1970."""
    controller = router.control.controller
    result: dict[str, Any] = {
        "enabled": True,
        "version": __version__,
        "at": round(time.time(), 3),
        "uptime_s": round(time.monotonic() - router.started_at, 1),
        "pools": {p: [i.url for i in router.pools.members(p)] for p in POOLS},
        "pressure": {p: round(controller.raw[p], 4) for p in POOLS},
        "balance": round(controller.balance, 4),
        "in_dead_band": controller.in_dead_band(),
        "prefill": [_prefill(r, router) for r in router.readers],
        "decode": [_instance(i) for i in router.decoders],
        "in_flight": router.places.taken,
        "max_inflight": router.places.most,
        "tasks": [asdict(w) for w in router.supervisor.watched],
        "counts": asdict(router.counts),
        "ttft_ms": router.services.journal.ttft.quantiles_ms(time.monotonic()),
        "migrations": [
            {"at": round(m.at, 3), "instance": m.move.name, "from": m.move.source, "to": m.move.target,
             "reason": m.move.reason}
            for m in reversed(router.history.moves)
        ],
        "tokens": router.services.counter.as_dict(),
        "config": asdict(router.config),
    }  # fmt: skip
    if history:
        result["history"] = list(router.history.samples)[-history:]
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


def _prefill(r: SignalReader, router: Router) -> dict[str, Any]:
    i = r.instance
    return {
        **_instance(i),
        "pool": i.pool,
        "pressure": round(pressure(r.signals(), router.config.pressure), 4),
        "signals": {**r.load.rounded(), "source": r.source},
        "prefix_blocks": len(i.prefixes),
    }
