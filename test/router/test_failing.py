"""Servers that fail: the choice of another server, and the return to the failed server."""

from __future__ import annotations

import asyncio
import json
from typing import Any, ClassVar

import pytest
from aiohttp import web

from .fakes import SHORT, Body, FakeDecode, FakePrefill, entry, stack


def test_circuit_breaker_limits_traffic_to_failing_server_and_recovers() -> None:
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


def test_failing_server_keeps_traffic_without_circuit_breaker() -> None:
    async def run() -> None:
        async with stack(2, 2, args={"disable_circuit_breaker": True}) as s:
            s.decodes[0].status = 500
            assert [(await s.post(text=SHORT))[0] for _ in range(40)].count(500) > 15

    asyncio.run(run())


def test_last_server_is_used_despite_open_breaker() -> None:
    async def run() -> None:
        async with stack(2, 1, args={"cb_failure_threshold": 2}) as s:
            s.decodes[0].status = 500
            assert [(await s.post(text=SHORT))[0] for _ in range(4)] == [500] * 4
            assert entry(await s.status(), s.decodes[0])["breaker"] == "open"
            s.decodes[0].status = 200
            assert (await s.post(text=SHORT))[0] == 200

    asyncio.run(run())


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_503_is_retried_at_another_server(role: str) -> None:
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


def test_failed_kv_transfer_is_retried() -> None:
    async def run() -> None:
        kinds = iter((Unjoined, FakePrefill, FakePrefill))
        async with stack(3, 2, make_prefill=lambda world: next(kinds)(world), config={"spill": "off"}) as s:
            for i in s.lb.pools.instances[:2]:
                i.pool = "short"
            assert [(await s.post(text=SHORT))[0] for _ in range(8)] == [200] * 8
            assert (await s.status())["counts"]["retried"] >= 1

    asyncio.run(run())


def test_failed_transfers_try_both_decode_servers_then_return_503() -> None:
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
def test_missing_kv_is_retried_after_decode_reply_has_begun(says: dict[str, Any], stream: bool) -> None:
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


def test_reply_of_client_abort_is_not_retried() -> None:
    said = {"text": "", "meta_info": {"finish_reason": {"type": "abort", "message": "Abort by a client"}}}

    async def run() -> None:
        async with stack(2, 2, make_decode=type("Now", (Unfed,), {"says": said, "asked": []})) as s:
            status, answer = await s.post(text=SHORT)
            assert (status, answer["meta_info"]["finish_reason"]["type"]) == (200, "abort")

    asyncio.run(run())


class Strange:
    """Server that answers each request with ``status``."""

    status = 200

    async def serve(self, request: web.Request, body: Body) -> web.StreamResponse:
        return web.Response(status=self.status, text="{}", headers={"location": "/health"})


class StrangePrefill(Strange, FakePrefill):
    pass


class StrangeDecode(Strange, FakeDecode):
    pass


@pytest.mark.parametrize("status", [302, 304, 600, 999])
@pytest.mark.parametrize("strange", ["prefill", "decode"])
def test_router_takes_no_redirect_and_no_unknown_status_for_answer(strange: str, status: int) -> None:
    """A redirect would become a GET of another page, and the connection to the client cannot send unknown statuses."""
    make = {"make_prefill": StrangePrefill} if strange == "prefill" else {"make_decode": StrangeDecode}

    async def run() -> None:
        async with stack(1, **make) as s:
            for server in s.prefills if strange == "prefill" else s.decodes:
                server.status = status
            found, reply = await s.post(text=SHORT)
            assert (found, reply["error"]["type"]) == (502, "upstream_lost")
            assert "\n" not in reply["error"]["message"]
            await s.at_rest()

    asyncio.run(run())


class Moved(FakeDecode):
    """Decode server behind another address."""

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        if "there" not in request.query:
            return web.Response(status=308, headers={"location": f"{request.path}?there"})
        return await super()._handle(request)


def test_router_follows_redirects_that_keep_posts() -> None:
    async def run() -> None:
        async with stack(1, make_decode=Moved) as s:
            assert (await s.post(text=SHORT))[0] == 200

    asyncio.run(run())


class Exotic(FakeDecode):
    """Decode server with a content type that is not Latin-1."""

    async def serve(self, request: web.Request, body: Body) -> web.StreamResponse:
        return web.Response(body=b"{}", headers={"content-type": "application/json; x=\u20ac"})


def test_router_passes_on_replies_with_exotic_content_types() -> None:
    async def run() -> None:
        async with stack(1, make_decode=Exotic) as s, s.client.post(f"{s.url}/generate", json={"text": SHORT}) as r:
            assert (r.status, await r.read()) == (200, b"{}")
            assert r.content_type == "application/json"

    asyncio.run(run())


BY_ABORT = "transfer failed for request rank=0 with exception KVTransferError(bootstrap_room=1): Aborted by AbortReq."
"""SGLang's error for a request that somebody has aborted before its KV was transferred."""


class AbortedPrefill(FakePrefill):
    """Prefill server at which each request has been aborted."""

    async def serve(self, request: web.Request, body: Body) -> web.StreamResponse:
        return web.json_response({"error": {"message": BY_ABORT, "code": 500}}, status=500)


class AbortedDecode(FakeDecode):
    """Decode server of this kind."""

    async def serve(self, request: web.Request, body: Body) -> web.StreamResponse:
        return web.json_response({"object": "error", "message": BY_ABORT}, status=500)


@pytest.mark.parametrize("half", [{"make_prefill": AbortedPrefill}, {"make_decode": AbortedDecode}])
@pytest.mark.parametrize("stream", [False, True])
def test_abort_before_transfer_is_neither_retried_nor_blamed(half: dict[str, Any], stream: bool) -> None:
    async def run() -> None:
        async with stack(2, 2, **half) as s:
            status, answer = await s.post(text=SHORT, stream=stream)
            assert (status, answer["error"]["type"]) == (499, "abort")
            found = await s.status()
            assert (found["counts"]["retried"], found["counts"]["failed"]) == (0, 0)
            assert sum(i["errors"] for i in (*found["prefill"], *found["decode"])) == 0
            await s.at_rest()

    asyncio.run(run())


@pytest.mark.parametrize(
    "says",
    [
        {"error": {"message": BY_ABORT, "code": 500}},
        {
            "text": "",
            "meta_info": {"finish_reason": {"type": "abort", "message": BY_ABORT}},
        },
    ],
)
def test_abort_before_transfer_is_not_retried_after_stream_has_begun(says: dict[str, Any]) -> None:
    async def run() -> None:
        async with stack(2, 2, make_decode=type("Now", (Unfed,), {"says": says, "asked": []})) as s:
            async with s.client.post(f"{s.url}/generate", json={"text": SHORT, "stream": True}) as r:
                assert "Aborted by AbortReq" in await r.text()
            assert (await s.status())["counts"]["retried"] == 0
            await s.at_rest()

    asyncio.run(run())
