"""Servers that accept every request and answer none: lost answers, and the return of such servers."""

from __future__ import annotations

import asyncio
import signal
import sys
from typing import Any

import pytest
from aiohttp import web
from sglang_router_laps.servers import health

from .fakes import NO_PROBES, PROBES, SHORT, Body, FakeDecode, FakePrefill, FakeServer, Stack, entry, stack


async def whole(s: Stack, **body: Any) -> tuple[int, bytes]:
    async with s.client.post(f"{s.url}/generate", json=body) as r:
        return r.status, await r.read()


class Hanging(FakeServer):
    """Server that accepts all requests but answers none while ``hung``."""

    hung = False
    unanswered = 0
    """Requests and probes that came while ``hung``."""

    async def _wait(self) -> None:
        if self.hung:
            self.unanswered += 1
            await asyncio.Event().wait()

    async def _health(self, request: web.Request) -> web.Response:
        await self._wait()
        return await super()._health(request)

    async def serve(self, request: web.Request, body: Body) -> web.StreamResponse:
        await self._wait()
        return await super().serve(request, body)


class HangingPrefill(Hanging, FakePrefill):
    pass


class HangingDecode(Hanging, FakeDecode):
    pass


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_requests_at_hung_server_are_answered_by_another(role: str, stream: bool) -> None:
    async def run() -> None:
        async with stack(
            2, 2, args=PROBES, config={"spill": "off"}, make_prefill=HangingPrefill, make_decode=HangingDecode
        ) as s:
            victim: Any = s.pool("short")[0] if role == "prefill" else s.decodes[0]
            victim.hung = True
            async with asyncio.timeout(180):
                replies = await asyncio.gather(*(whole(s, text=SHORT, stream=stream) for _ in range(6)))
            assert [status for status, _ in replies] == [200] * 6
            assert all(b"t2" in reply for _, reply in replies)
            found = await s.status()
            assert not entry(found, victim)["healthy"]
            assert found["counts"]["failed"] == 0
            victim.hung = False
            await s.at_rest()

    asyncio.run(run())


STOPPABLE = """
import asyncio
from aiohttp import web

async def health(request):
    return web.Response()

async def generate(request):
    await request.read()
    return web.json_response({"text": "t", "meta_info": {"prompt_tokens": 1}})

async def main():
    app = web.Application()
    app.router.add_get("/health", health)
    app.router.add_post("/generate", generate)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    print("http://127.0.0.1:%d" % runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def test_stopped_server_process_is_avoided_and_readmitted() -> None:
    async def run() -> None:
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", STOPPABLE, stdout=asyncio.subprocess.PIPE)
        try:
            assert process.stdout
            async with asyncio.timeout(180):
                url = (await process.stdout.readline()).decode().strip()
            async with stack(2, 1, more_decodes=[url], args=PROBES) as s:
                assert [(await s.post(text=SHORT))[0] for _ in range(2)] == [200] * 2
                process.send_signal(signal.SIGSTOP)
                async with asyncio.timeout(180):
                    replies = await asyncio.gather(*(s.post(text=SHORT) for _ in range(8)))
                assert [status for status, _ in replies] == [200] * 8
                assert not entry(await s.status(), url)["healthy"]
                process.send_signal(signal.SIGCONT)
                instance = next(i for i in s.lb.decoders if i.url == url)
                await s.until(lambda: instance.healthy, timeout=120)
                await s.at_rest()
        finally:
            process.kill()
            await process.wait()

    asyncio.run(run())


def test_timeouts_mark_silent_server_unhealthy(monkeypatch: pytest.MonkeyPatch) -> None:
    # Otherwise a machine that stands still for a second takes the blame.
    monkeypatch.setattr(health, "LATE_S", 600.0)

    async def run() -> None:
        async with stack(2, args={"request_timeout_secs": 1.0, **NO_PROBES}, config={"spill": "off"}) as s:
            short = s.pool("short")[0]
            short.gate.clear()
            instance = s.lb.pools.by_url(short.url)
            assert [(await s.post(text=SHORT))[0] for _ in range(3)] == [504] * 3
            assert not instance.healthy
            s.lb.args.request_timeout_secs = 120
            # The decode server waited for the prefill server, but answers other requests.
            assert (await s.post(text=SHORT))[0] == 200
            short.gate.set()

    asyncio.run(run())


def test_streaming_server_without_probe_answers_stays_healthy() -> None:
    async def run() -> None:
        args = {"health_check_interval_secs": 0.2, "health_check_timeout_secs": 0.2}
        async with stack(2, args=args, make_decode=lambda w: HangingDecode(w, chunks=60, pause_s=0.05)) as s:
            decode: Any = s.decodes[0]
            async with s.client.post(f"{s.url}/generate", json={"text": SHORT, "stream": True}) as r:
                await r.content.readany()
                # The server still sends tokens, but answers no probe any more.
                decode.hung = True
                assert b"[DONE]" in await r.read()
            assert decode.unanswered > 0
            assert s.lb.decoders[0].healthy
            decode.hung = False

    asyncio.run(run())
