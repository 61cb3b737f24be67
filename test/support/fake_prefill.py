"""A prefill server without a model: the page ``/laps`` as the plugin serves it, and synthetic answers beside it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import uvicorn
from fastapi import FastAPI, HTTPException, Request, Response
from laps_core.config import LapsConfig
from laps_core.latency.model import LatencyModel
from laps_core.paper import pacer
from laps_core.receipts.receipt import RECEIPTS_ROUTE, TRACE_ROUTE, Receipts
from sglang.srt.utils.auth import AuthLevel, add_api_key_middleware, auth_level
from sglang_laps.http import page_route
from synthetic_history import History

Json = dict[str, Any]


class FakePrefill:
    """Prefill server that replays synthetic histories in real time."""

    def __init__(
        self,
        *,
        ranks: int = 1,
        reason: str | None = None,
        empty: bool = False,
        missing: bool = False,
        seconds: float = 90.0,
    ) -> None:
        """`reason`: why LAPS is off. `empty`: no request has arrived. `missing`: no receipts and no trace (404).
        `seconds`: length of the histories, of which 45 s have passed."""
        start_s = time.time() - 45.0
        self.histories = [] if empty else [History(start_s, seconds, rank=rank) for rank in range(ranks)]
        self.ranks, self.reason, self.missing = ranks, reason, missing
        self.request_counts: Counter[str] = Counter()
        self.url = ""
        self.ended = False
        """True to serve all receipts of the histories, regardless of the clock."""
        self.extra: Json = {}
        """Entries of the status that a test changes."""
        status = pacer(
            LapsConfig(), chunk_tokens=8192, batch_tokens=16384, unit=1, layers=0, even=False, model=LatencyModel()
        ).status(0.0)
        status["latency_model"] |= {"fitted": True, "error": {"median": 0.043, "p90": 0.13, "samples": 412}}
        status["preemption"] |= {"by_short_batches": 1234, "by_smaller_prompts": 5}
        self._decisions = status

    def receipts(self, now: float) -> list[Any]:
        """Return the receipts until `now` (Unix time)."""
        return [r for h in self.histories for r in h.receipts if self.ended or h.first_token_s(r) <= now]

    def status(self) -> Json:
        """Return the current answer of /laps_status."""
        if self.reason:
            return {"enabled": False, "version": "0.1.0", "reason": self.reason, "config": LapsConfig().as_dict()}
        found = [self._rank(rank) for rank in range(self.ranks)]
        first = {**found[0], **self.extra}
        if self.ranks > 1:
            from sglang_laps.telemetry.status import merge

            first = {**merge(found), **self.extra}
        return first

    def _rank(self, rank: int) -> Json:
        now = time.time()
        waiting: dict[str, list[Any]] = {"short": [], "long": []}
        for h in self.histories[rank : rank + 1]:
            for p in h.prompts:
                if h.start_s + p.at <= now < h.start_s + (p.begun or p.at):
                    waiting[p.cls].append((now - h.start_s - p.at, p.tokens))
        queues = {
            cls: {
                "depth": len(ps),
                "waiting_tokens": sum(n for _, n in ps),
                "oldest_wait_s": max((w for w, _ in ps), default=0.0),
            }
            for cls, ps in waiting.items()
        }
        totals = {"batches": 10, "requests": 50, "tokens": 5000, "busy_s": 9.5}
        return {
            "enabled": True, "version": "0.1.0", "dp_rank": rank, "longest": 100_000, "holds": 120_000,
            "load": {"backlog_tokens": sum(q["waiting_tokens"] for q in queues.values()), "slo_deviation": 0.0,
                     "busy_share": 0.83 if self.histories else 0.0},
            "config": LapsConfig().as_dict(), "queues": queues, "parked": None, "in_progress": 0,
            "slices": {"on": True, "why_not": None, "operators": 0, "launch_ms": 0.1, "pause_ms": 0.3},
            **self._decisions, "totals": {"short": totals, "long": totals}, "graphs": {},
            "uptime_s": 4321.0, "age_s": 0.1,
        }  # fmt: skip

    def application(self, key: str | None, admin: str | None) -> FastAPI:
        """Return an application with the page, protected by keys as in SGLang."""
        app = FastAPI()
        page_route.add(app)

        @app.get("/laps_status")
        @auth_level(AuthLevel.ADMIN_OPTIONAL)
        async def status() -> Json:
            self.request_counts["status"] += 1
            return self.status()

        @app.get(f"/{RECEIPTS_ROUTE}")
        @auth_level(AuthLevel.ADMIN_OPTIONAL)
        async def receipts(request: Request, rid: str = "", slowest: int = 0, seconds: float = 0.0) -> Response:
            self.request_counts["receipts"] += 1
            if self.missing:
                raise HTTPException(404)
            now = time.time()
            cls = request.query_params.get("class")
            known = [r for r in self.receipts(now) if cls in (None, r.cls)]
            found = [r for r in known if r.rid == rid] if rid else known
            if slowest:
                found = sorted(known, key=lambda r: -r.ttft_ms)[:slowest]
            elif seconds:
                found = [r for r in known if r.arrived_s + r.ttft_ms / 1e3 >= now - seconds]
            return Response(
                msgspec.json.encode(Receipts(receipts=found, kept=len(known))), media_type="application/json"
            )

        @app.get(f"/{TRACE_ROUTE}")
        @auth_level(AuthLevel.ADMIN_OPTIONAL)
        async def trace(seconds: float = 30.0) -> Json:
            self.request_counts["trace"] += 1
            if self.missing:
                raise HTTPException(404)
            now = time.time()
            base_us = round(1e6 * (now - seconds))
            events = [e for h in self.histories for e in h.trace(now - seconds, now, base_us)]
            return {"displayTimeUnit": "ms", "otherData": {"begins_unix_s": base_us / 1e6}, "traceEvents": events}

        if key or admin:
            add_api_key_middleware(app, api_key=key, admin_api_key=admin)
        return app


@contextlib.asynccontextmanager
async def serve(fake: FakePrefill, key: str | None = None, admin: str | None = None) -> AsyncIterator[FakePrefill]:
    """Serve ``fake`` on a free port."""
    config = uvicorn.Config(fake.application(key, admin), host="127.0.0.1", port=0, log_level="warning", lifespan="off")
    server = uvicorn.Server(config)
    # pytest keeps its own signal handlers.
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]
    task = asyncio.create_task(server.serve())
    try:
        async with asyncio.timeout(60):
            while not server.started:
                assert not task.done()
                await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        fake.url = f"http://127.0.0.1:{port}"
        yield fake
    finally:
        server.should_exit, server.force_exit = True, True
        await task
