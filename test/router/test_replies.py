"""Replies that contain an error, break off, or arrive in pieces; memory that a stream keeps."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import tracemalloc
from collections.abc import Callable

import pytest
from aiohttp import web
from laps_core.pools.outlook import START

from .fake_replies import answer
from .fakes import JSON_TYPE, SHORT, Body, FakeDecode, FakePrefill, World, events_of, stack


class FailingPrefill(FakePrefill):
    """Prefill server that answers 200 with an error inside the stream or the reply."""

    async def serve(self, request: web.Request, body: Body) -> web.StreamResponse:
        await self.gate.wait()
        error = {"message": "too long", "type": "BadRequestError", "code": 400}
        return await answer(request, body, [{"error": error}])


class AbortingPrefill(FakePrefill):
    async def serve(self, request: web.Request, body: Body) -> web.StreamResponse:
        reason = {"type": "abort", "message": "no memory", "status_code": 503}
        return await answer(request, body, [{"text": "", "meta_info": {"finish_reason": reason}}])


@pytest.mark.parametrize(
    ("make", "stream", "expected"),
    [
        (FailingPrefill, True, (400, "too long")),
        (FailingPrefill, False, (400, "too long")),
        (AbortingPrefill, True, (503, "no memory")),
        (AbortingPrefill, False, (503, "no memory")),
    ],
)
def test_error_inside_prefill_reply_is_returned_to_client(
    make: Callable[[World], FakePrefill], stream: bool, expected: tuple[int, str]
) -> None:
    async def run() -> None:
        async with stack(2, make_prefill=make) as s:
            async with asyncio.timeout(120):
                async with s.client.post(f"{s.url}/generate", json={"text": SHORT, "stream": stream}) as r:
                    found = (r.status, (await r.json())["error"]["message"])
            assert found == expected
            await s.at_rest()
            # Only the decode server still has the request.
            await s.until(lambda: len(s.decodes[0].aborted) >= 1)
            assert not any(p.aborted for p in s.prefills)

    asyncio.run(run())


class AskedPrefill(FakePrefill):
    """Prefill server whose waiting requests were aborted, as somebody had asked."""

    async def serve(self, request: web.Request, body: Body) -> web.StreamResponse:
        reason = {"type": "abort", "message": "Abort in waiting queue"}
        return await answer(request, body, [{"text": "", "meta_info": {"finish_reason": reason}}])


@pytest.mark.parametrize("stream", [False, True])
def test_router_blames_no_server_for_aborts(stream: bool) -> None:
    async def run() -> None:
        async with stack(2, args={"cb_failure_threshold": 2}, make_prefill=AskedPrefill) as s:
            for _ in range(4):
                async with s.client.post(f"{s.url}/generate", json={"text": SHORT, "stream": stream}) as r:
                    assert (r.status, (await r.json())["error"]["message"]) == (499, "Abort in waiting queue")
            for server in (await s.status())["prefill"]:
                assert (server["breaker"], server["errors"]) == ("closed", 0)

    asyncio.run(run())


class RefusingDecode(FakeDecode):
    """Decode server that refuses each request, after its prefill server has it."""

    inside = False
    """Refuse inside a reply with status 200."""

    async def serve(self, request: web.Request, body: Body) -> web.StreamResponse:
        await asyncio.sleep(0.2)
        error = {"error": {"message": "too long", "code": 400}}
        return await answer(request, body, [error]) if self.inside else web.json_response(error, status=400)


@pytest.mark.parametrize("refusing", ["prefill", "decode", "inside"])
@pytest.mark.parametrize("stream", [False, True])
def test_router_learns_no_times_from_errors(refusing: str, stream: bool) -> None:
    """Servers refuse a prompt that is too long at once, so long prompts would seem to take no time."""

    def prefill(world: World) -> FakePrefill:
        p = FailingPrefill(world) if refusing == "prefill" else FakePrefill(world)
        p.laps = False
        if refusing != "prefill":
            p.gate.clear()
        return p

    def decode(world: World) -> FakeDecode:
        d = RefusingDecode(world)
        d.inside = refusing == "inside"
        return d

    async def run() -> None:
        async with stack(2, make_prefill=prefill, make_decode=decode) as s:
            async with s.client.post(f"{s.url}/generate", json={"text": "a" * 400, "stream": stream}) as r:
                assert b"too long" in await r.read()
            for p in s.prefills:
                p.gate.set()
            await s.at_rest()
            assert s.lb.pools.learnt.model is START

    asyncio.run(run())


class HalfDecode(FakeDecode):
    """Decode server that sends the events of a batch's first prompt, then waits in vain for the second prompt's KV."""

    async def serve(self, request: web.Request, body: Body) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b'data: {"text": "t0", "index": 0}\n\n')
        await asyncio.Event().wait()
        return response


def test_prefill_error_ends_running_stream() -> None:
    def late(world: World) -> FakePrefill:
        p = FailingPrefill(world)
        p.gate.clear()
        return p

    async def run() -> None:
        async with stack(2, make_prefill=late, make_decode=HalfDecode) as s:
            async with asyncio.timeout(120):
                async with s.client.post(f"{s.url}/generate", json={"text": [SHORT, SHORT], "stream": True}) as r:
                    assert r.status == 200
                    await r.content.readany()
                    for p in s.prefills:
                        p.gate.set()
                    events = await events_of(r)
            assert json.loads(events[-1])["error"]["message"] == "too long"
            await s.at_rest()

    asyncio.run(run())


class BreakingDecode(FakeDecode):
    """Decode server that breaks the connection in the middle of its second event."""

    async def serve(self, request: web.Request, body: Body) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b'data: {"text": "t0"}\n\ndata: {"text": "half of')
        # Let the written bytes leave before the connection is cut.
        await asyncio.sleep(0.2)
        assert request.transport is not None
        request.transport.abort()
        return response


def test_stream_broken_inside_event_ends_with_one_error_event() -> None:
    async def run() -> None:
        async with stack(2, make_decode=BreakingDecode) as s:
            async with s.client.post(f"{s.url}/generate", json={"text": SHORT, "stream": True}) as r:
                events = [json.loads(e) for e in await events_of(r)]
            assert [e.get("text") for e in events] == ["t0", None]
            assert events[-1]["error"]["type"] == "upstream_lost"

    asyncio.run(run())


class SlowPieces(FakeDecode):
    """Decode server that writes each event in arbitrary pieces."""

    async def serve(self, request: web.Request, body: Body) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for piece in (b"data: {", b'"text": 1}\n', b'\ndata: {"text": 2}\n\nda', b"ta: [DONE]\n\n", b"rest"):
            await response.write(piece)
            await asyncio.sleep(0.05)
        await response.write_eof()
        return response


def test_stream_sent_in_fragments_arrives_complete() -> None:
    async def run() -> None:
        async with stack(2, make_decode=SlowPieces) as s:
            body = {"text": SHORT, "stream": True}
            async with s.client.post(f"{s.url}/generate", json=body) as r:
                assert await r.read() == b'data: {"text": 1}\n\ndata: {"text": 2}\n\ndata: [DONE]\n\nrest'

    asyncio.run(run())


class Forgetful:
    """Server that keeps nothing of a request's body."""

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        async for _ in request.content.iter_any():
            pass
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b'data: {"text": "t0"}\n\n')
        if isinstance(self, FakeDecode):
            await self.world.event(0).wait()
        await response.write_eof()
        return response


class ForgetfulPrefill(Forgetful, FakePrefill):
    pass


class ForgetfulDecode(Forgetful, FakeDecode):
    pass


def test_request_body_is_released_once_stream_begins() -> None:
    size, n = 2_000_000, 8
    raw = json.dumps({"stream": True, "text": "x" * size}).encode()

    async def run() -> None:
        async with (
            stack(2, make_prefill=ForgetfulPrefill, make_decode=ForgetfulDecode) as s,
            contextlib.AsyncExitStack() as open_,
        ):
            tracemalloc.start()
            try:
                for _ in range(n):
                    r = await open_.enter_async_context(s.client.post(f"{s.url}/generate", data=raw, headers=JSON_TYPE))
                    assert await r.content.readany()
                await s.until(lambda: all(i.outstanding == 0 for i in s.lb.pools.instances))
                end = time.monotonic() + 120
                while (held := tracemalloc.get_traced_memory()[0]) > n * size / 4 and time.monotonic() < end:
                    await asyncio.sleep(0.1)
            finally:
                tracemalloc.stop()
            assert s.lb.queue.in_flight == n
            assert held < n * size / 4
            s.decodes[0].world.event(0).set()

    asyncio.run(run())
