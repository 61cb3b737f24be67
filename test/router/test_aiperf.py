"""aiperf, a client that is not ours, through the router; skipped where it is not installed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from laps_plan.traffic.job import Job
from served import checkpoint

from benchmark.load import aiperf

from .fake_replies import Body, answer, rooms_of
from .fakes import FakeDecode, stack

pytestmark = pytest.mark.skipif(bool(aiperf.lacking()), reason=aiperf.lacking())

TOKENS = 5
SYSTEM = 4 * aiperf.BLOCK
JOBS = [Job(0.05 * i, 40 if i % 4 else 900, SYSTEM, stream=i % 2) for i in range(40)]


class Completing(FakeDecode):
    """Speaks as OpenAI's completions do."""

    async def serve(self, request: web.Request, body: Body) -> web.StreamResponse:
        await asyncio.gather(*(self.world.event(room).wait() for room in rooms_of(body)))
        common: dict[str, Any] = {"id": "x", "object": "text_completion", "model": body["model"]}
        pieces = [{**common, "choices": [{"index": 0, "text": f" t{i}"}]} for i in range(body["max_tokens"])]
        usage = {"prompt_tokens": 9, "completion_tokens": body["max_tokens"], "total_tokens": 9 + body["max_tokens"]}
        return await answer(request, body, [*pieces, {**common, "choices": [], "usage": usage}], self.pause_s)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    aiperf.hub(checkpoint(), tmp_path / "hub")
    aiperf.write(aiperf.trace(JOBS, TOKENS), tmp_path / "trace.jsonl")
    return tmp_path / "hub"


def test_every_request_of_a_trace_is_answered(cache: Path, tmp_path: Path) -> None:
    async def run() -> None:
        async with stack(2, make_decode=Completing) as s:
            line = aiperf.command(aiperf.found(), s.url, "completions", tmp_path / "trace.jsonl", tmp_path, 1, raw=True)
            # With all that it asks of a server besides.
            line.remove("--no-server-metrics")
            line += ["--wait-for-model-timeout", "60", "--reset-kv-cache", "--reset-kv-cache-path", "/flush_cache"]
            await asyncio.to_thread(aiperf.run, line, tmp_path / "log", cache, aiperf.LIMIT_S)
            assert aiperf.summary(tmp_path).answered == len(JOBS)
            sent = aiperf.sent(tmp_path)
            assert [one.number for one in sent] == list(range(len(JOBS)))
            bodies = [body for body in s.decodes[0].bodies if body["max_tokens"] == TOKENS]
            assert sorted(body["prompt"] for body in bodies) == sorted(one.payload["prompt"] for one in sent)
            assert [p.flushed for p in s.prefills] == [1, 1]
            status = await s.status()
            assert status["counts"]["failed"] == status["counts"]["disconnected"] == 0
            # What hash ids share, the router finds in the prompts' text.
            assert status["counts"]["prefix_tokens"] > 0
            assert "laps_router" in (tmp_path / "server_metrics_export.csv").read_text()
            await s.at_rest()

    asyncio.run(run())


def test_requests_that_it_cancels_are_dropped_by_the_servers(cache: Path, tmp_path: Path) -> None:
    async def run() -> None:
        # A stream is far from its end when it is cancelled.
        async with stack(2, make_decode=lambda world: Completing(world, pause_s=1.0)) as s:
            line = aiperf.command(
                aiperf.found(), s.url, "completions", tmp_path / "trace.jsonl", tmp_path, 1, raw=False
            )
            line += ["--request-cancellation-rate", "50", "--request-cancellation-delay", "0.2"]
            await asyncio.to_thread(aiperf.run, line, tmp_path / "log", cache, aiperf.LIMIT_S)
            await s.at_rest()
            cancelled = (await s.status())["counts"]["disconnected"]
            assert 0 < cancelled == len(JOBS) - aiperf.summary(tmp_path).answered
            await s.until(lambda: len(s.decodes[0].aborted) == cancelled)

    asyncio.run(run())
