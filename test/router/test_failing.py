"""Servers that fail: the choice of another server, and the return to the failed server."""

from __future__ import annotations

import asyncio
import json
from typing import Any, ClassVar

import pytest
from aiohttp import web

from .fakes import SHORT, Body, FakeDecode, FakePrefill, entry, stack


def test_a_server_that_fails_fast_does_not_draw_the_traffic() -> None:
    async def run() -> None:
        async with stack(2, 2, args={"cb_timeout_duration_secs": 1, "cb_failure_threshold": 5}) as s:
            sick, well = s.decodes
            sick.status = 500
            statuses = []
            for _ in range(25):
                statuses += [status for status, _ in await asyncio.gather(*(s.post(text=SHORT) for _ in range(4)))]
            found = await s.status()
            assert statuses.count(500) < 25
            assert statuses.count(200) == 100 - statuses.count(500)
            assert entry(found, sick)["breaker"] in ("open", "half_open")
            assert entry(found, well)["breaker"] == "closed"
            async with s.client.get(f"{s.url}/metrics") as r:
                text = await r.text()
            line = next(x for x in text.splitlines() if x.startswith("laps_router_breaker_state") and sick.url in x)
            assert float(line.rsplit(" ", 1)[1]) > 0

            sick.status = 200
            instance = next(i for i in s.lb.decoders if i.url == sick.url)
            async with asyncio.timeout(120):
                while instance.breaker.state != "closed":
                    assert (await s.post(text=SHORT))[0] == 200
            await s.at_rest()

    asyncio.run(run())


def test_without_the_breaker_it_does() -> None:
    async def run() -> None:
        async with stack(2, 2, args={"disable_circuit_breaker": True}) as s:
            s.decodes[0].status = 500
            assert [(await s.post(text=SHORT))[0] for _ in range(40)].count(500) > 15

    asyncio.run(run())


def test_the_last_server_is_asked_although_its_breaker_is_open() -> None:
    async def run() -> None:
        async with stack(2, 1, args={"cb_failure_threshold": 2}) as s:
            s.decodes[0].status = 500
            assert [(await s.post(text=SHORT))[0] for _ in range(4)] == [500] * 4
            s.decodes[0].status = 200
            assert (await s.post(text=SHORT))[0] == 200

    asyncio.run(run())


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_503_is_tried_elsewhere(role: str) -> None:
    async def run() -> None:
        async with stack(2, 2, config={"spill": "off"}) as s:
            sick = s.pool("short")[0] if role == "prefill" else s.decodes[0]
            sick.status = 503
            assert [(await s.post(text=SHORT))[0] for _ in range(8)] == [200] * 8
            assert (await s.status())["counts"]["retried"] >= 1
            await s.at_rest()

    asyncio.run(run())


class Unjoined(FakePrefill):
    """Prefill server whose transfers fail, as if the decode server had just died."""

    async def serve(self, request: web.Request, body: Body) -> web.StreamResponse:
        message = f"Prefill transfer failed for request req.rid={body['rid']!r} with exception KVTransferError: dead"
        return web.json_response({"error": {"message": message}}, status=500)


def test_a_transfer_that_failed_is_tried_again() -> None:
    async def run() -> None:
        kinds = iter((Unjoined, FakePrefill, FakePrefill))
        async with stack(3, 2, make_prefill=lambda world: next(kinds)(world), config={"spill": "off"}) as s:
            for i in s.lb.pools.instances[:2]:
                i.pool = "short"
            assert [(await s.post(text=SHORT))[0] for _ in range(8)] == [200] * 8
            assert (await s.status())["counts"]["retried"] >= 1

    asyncio.run(run())


def test_a_pair_that_failed_a_transfer_is_left_by_changing_either_server() -> None:
    """With a single prefill server, another decode server makes another pair."""

    async def run() -> None:
        async with stack(2, 2, config={"spill": "off"}, make_prefill=Unjoined) as s:
            for p in s.prefills:
                p.gate.set()
            async with s.client.post(f"{s.url}/generate", json={"text": SHORT}) as r:
                assert (r.status, r.headers["retry-after"]) == (503, "1"), "later there may be a way"
                assert "KVTransferError: dead" in (await r.json())["error"]["message"]
            sent = [len(d.bodies) for d in s.decodes]
            assert min(sent) >= 1, "both decode servers were tried"

    asyncio.run(run())


class Unfed(FakeDecode):
    """Decode server that misses the KV of its first request, but notices this after its status line has been sent."""

    says: ClassVar[dict[str, Any]] = {}
    asked: ClassVar[list[Body]] = []

    async def serve(self, request: web.Request, body: Body) -> web.StreamResponse:
        self.asked.append(body)
        if len(self.asked) > 1:
            return await super().serve(request, body)
        if not body.get("stream"):
            return web.json_response(self.says)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: " + json.dumps(self.says).encode() + b"\n\ndata: [DONE]\n\n")
        return response


TRANSFER = {"message": "Decode transfer failed for request rank=0 with exception KVTransferError(1): dead"}
ABORTED = {"text": "", "meta_info": {"finish_reason": {"type": "abort", "message": TRANSFER["message"]}}}


@pytest.mark.parametrize("says", [{"error": TRANSFER}, ABORTED])
@pytest.mark.parametrize("stream", [False, True])
def test_kv_that_never_came_is_tried_again_though_the_reply_had_begun(says: dict[str, Any], stream: bool) -> None:
    async def run() -> None:
        async with stack(2, 2, make_decode=type("Now", (Unfed,), {"says": says, "asked": []})) as s:
            async with s.client.post(f"{s.url}/generate", json={"text": SHORT, "stream": stream}) as r:
                assert r.status == 200
                text = await r.text()
            assert "KVTransferError" not in text
            assert '"text": "t' in text
            assert (await s.status())["counts"]["retried"] >= 1
            await s.at_rest()

    asyncio.run(run())


def test_an_abort_that_a_client_asked_for_is_passed_on() -> None:
    said = {"text": "", "meta_info": {"finish_reason": {"type": "abort", "message": "Abort by a client"}}}

    async def run() -> None:
        async with stack(2, 2, make_decode=type("Now", (Unfed,), {"says": said, "asked": []})) as s:
            status, answer = await s.post(text=SHORT)
            assert (status, answer["meta_info"]["finish_reason"]["type"]) == (200, "abort")

    asyncio.run(run())
