"""Streams that stall, and timely delivery of their events to readers."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web
from sglang_router_laps.request import attempt
from sglang_router_laps.request.streams import MergedEvents
from sglang_router_laps.servers import health

from .fake_replies import answer
from .fakes import NO_PROBES, PROBES, SHORT, Body, FakeDecode, FakePrefill, events_of, stack


class StoppingDecode(FakeDecode):
    """Decode server that stalls in the middle of a stream; if ``deaf``, it then answers no probe, either."""

    deaf = False
    stopped = False

    async def _health(self, request: web.Request) -> web.Response:
        while self.stopped and self.deaf:
            await asyncio.sleep(3600)
        return await super()._health(request)

    async def serve(self, request: web.Request, body: Body) -> web.StreamResponse:
        await self.world.event(body["bootstrap_room"]).wait()
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b'data: {"text": "t0"}\n\ndata: {"te')
        self.stopped = True
        await asyncio.sleep(3600)
        return response


@pytest.mark.parametrize("deaf", [False, True], ids=["answers-probes", "deaf"])
def test_stalled_stream_ends_with_error_event(deaf: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    args: dict[str, Any] = PROBES if deaf else {"request_timeout_secs": 120, **NO_PROBES}
    if not deaf:
        monkeypatch.setattr(health, "SILENCE", 1 / 120)

    async def run() -> None:
        async with stack(2, args=args, make_decode=StoppingDecode) as s:
            decode: Any = s.decodes[0]
            decode.deaf = deaf
            async with (
                asyncio.timeout(120),
                s.client.post(f"{s.url}/generate", json={"text": SHORT, "stream": True}) as r,
            ):
                events = [json.loads(e) for e in await events_of(r)]
            assert [e.get("text") for e in events] == ["t0", None]
            assert events[-1]["error"]["type"] == "upstream_lost"
            assert "it sent nothing for" in events[-1]["error"]["message"]
            await s.at_rest()
            assert (await s.status())["counts"]["failed"] == 1
            if not deaf:
                await s.until(lambda: bool(decode.aborted))

    asyncio.run(run())


class PartDecode(FakeDecode):
    """Decode server that streams a batch's first prompt while the other one waits for its prefill."""

    async def serve(self, request: web.Request, body: Body) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b'data: {"text": "t0", "index": 0}\n\n')
        await asyncio.gather(*(self.world.event(room).wait() for room in body["bootstrap_room"]))
        await response.write(b'data: {"text": "t1", "index": 1}\n\ndata: [DONE]\n\n')
        return response


def test_batch_stream_may_wait_for_prefill_of_its_other_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "SILENCE", 0.3 / 120)

    async def run() -> None:
        async with stack(1, args={"request_timeout_secs": 120, **NO_PROBES}, make_decode=PartDecode) as s:
            s.prefills[0].gate.clear()
            body = {"text": [SHORT, SHORT], "stream": True}
            async with asyncio.timeout(120), s.client.post(f"{s.url}/generate", json=body) as r:
                first = await r.content.readuntil(b"\n\n")
                # Several times as long as a stream may stand still otherwise.
                await asyncio.sleep(1.5)
                s.prefills[0].gate.set()
                rest = await r.read()
            assert b"t0" in first
            assert b"error" not in rest
            assert rest.endswith(b"data: [DONE]\n\n")

    asyncio.run(run())


class LogprobPrefill(FakePrefill):
    """Prefill server with the log-probabilities of a long prompt."""

    async def serve(self, request: web.Request, body: Body) -> web.StreamResponse:
        self.world.event(body["bootstrap_room"]).set()
        return await answer(request, body, [{"text": "x", "meta_info": {"input_token_logprobs": [[-1.0, 5]] * 1000}}])


class BurstDecode(FakeDecode):
    """Decode server that sends many events at once."""

    async def serve(self, request: web.Request, body: Body) -> web.StreamResponse:
        await self.world.event(body["bootstrap_room"]).wait()
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        event = json.dumps({"text": "t", "meta_info": {"input_token_logprobs": [[-2.0, 6]]}})
        await response.write(f"data: {event}\n\n".encode() * 100 + b"data: [DONE]\n\n")
        return response


def test_logprob_stream_lets_others_run_between_its_events(monkeypatch: pytest.MonkeyPatch) -> None:
    turns, at_turn = 0, []

    class Watched(MergedEvents):
        def _merged(self, event: bytes) -> bytes:
            at_turn.append(turns)
            return super()._merged(event)

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    monkeypatch.setattr(attempt, "MergedEvents", Watched)

    async def run() -> None:
        async with stack(2, make_prefill=LogprobPrefill, make_decode=BurstDecode) as s:
            counting = asyncio.create_task(count())
            body = {"text": SHORT, "stream": True, "return_logprob": True}
            async with s.client.post(f"{s.url}/generate", json=body) as r:
                *events, done = await events_of(r)
            counting.cancel()
            assert (len(events), done) == (100, "[DONE]")
            assert {len(json.loads(e)["meta_info"]["input_token_logprobs"]) for e in events} == {1001}
            assert len(at_turn) - len(set(at_turn)) <= 1

    asyncio.run(run())


class CarefulDecode(FakeDecode):
    """Decode server that sends an event with line ends ``ends`` in pieces and ends when the test says so."""

    pieces = (b'data: {"text"', b': "t0"}\r', b"\n\r\n")

    def __init__(self, world: Any) -> None:
        super().__init__(world)
        self.may_end = asyncio.Event()

    async def serve(self, request: web.Request, body: Body) -> web.StreamResponse:
        await self.world.event(body["bootstrap_room"]).wait()
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for piece in self.pieces:
            await response.write(piece)
            await asyncio.sleep(0.02)
        await self.may_end.wait()
        await response.write(b"data: [DONE]\r\n\r\n")
        return response


def test_events_with_crlf_are_forwarded_immediately_and_unbuffered() -> None:
    async def run() -> None:
        async with stack(2, make_decode=CarefulDecode) as s:
            decode: Any = s.decodes[0]
            async with s.client.post(f"{s.url}/generate", json={"text": SHORT, "stream": True}) as r:
                assert r.headers["cache-control"] == "no-cache"
                assert r.headers["x-accel-buffering"] == "no"
                async with asyncio.timeout(120):
                    assert await r.content.readuntil(b"\r\n\r\n") == b'data: {"text": "t0"}\r\n\r\n'
                decode.may_end.set()
                assert await r.read() == b"data: [DONE]\r\n\r\n"

    asyncio.run(run())
