"""Retries: their number, the servers that they may harm, and their ids."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web

from .fakes import JSON_TYPE, SHORT, Body, FakeDecode, FakePrefill, FakeServer, stack


class Busy(FakeDecode):
    async def serve(self, request: web.Request, body: Body) -> web.StreamResponse:
        return web.json_response({"error": {"message": "full"}}, status=503, headers={"Retry-After": "17"})


@pytest.mark.parametrize("args", [{}, {"disable_retries": True}, {"retry_max_retries": 1}])
def test_final_503_keeps_retry_after_of_server(args: Body) -> None:
    async def run() -> None:
        async with stack(2, 2, args=args, make_decode=Busy) as s:
            async with s.client.post(f"{s.url}/generate", json={"text": SHORT}) as r:
                assert (r.status, r.headers["retry-after"]) == (503, "17")
                assert (await r.json())["error"]["message"] == "full"
            assert sum(len(d.bodies) for d in s.decodes) == (1 if args else 2)
            await s.at_rest()

    asyncio.run(run())


def test_total_retries_are_bounded() -> None:
    async def run() -> None:
        args = {"retry_initial_backoff_ms": 1, "disable_circuit_breaker": True}
        async with stack(2, 3, args=args, make_decode=Busy) as s:
            for _ in range(15):
                await asyncio.gather(*(s.post(text=SHORT) for _ in range(20)))
            assert sum(len(d.bodies) for d in s.decodes) < 300 + 100 + 0.2 * 300 + 5

    asyncio.run(run())


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_request_that_kills_server_is_not_retried(role: str) -> None:
    killed: list[FakeServer] = []

    async def die(server: FakeServer, body: Body) -> None:
        if body["text"].startswith("poison") and server.role == role:
            killed.append(server)
            await asyncio.shield(asyncio.ensure_future(server.stop()))
            await asyncio.Event().wait()

    class MortalPrefill(FakePrefill):
        async def serve(self, request: web.Request, body: Body) -> web.StreamResponse:
            await die(self, body)
            return await super().serve(request, body)

    class MortalDecode(FakeDecode):
        async def serve(self, request: web.Request, body: Body) -> web.StreamResponse:
            await die(self, body)
            return await super().serve(request, body)

    async def run() -> None:
        async with stack(4, 4, make_prefill=MortalPrefill, make_decode=MortalDecode) as s:
            async with asyncio.timeout(180):
                status, reply = await s.post(text="poison")
            assert (status, reply["error"]["type"]) == (502, "upstream_lost")
            assert len(killed) == 1
            assert (await s.post(text=SHORT))[0] == 200
            await s.at_rest()

    asyncio.run(run())


def test_requests_lost_together_are_retried_once() -> None:
    killed: list[FakeServer] = []

    class Mortal(FakePrefill):
        async def serve(self, request: web.Request, body: Body) -> web.StreamResponse:
            if body["text"].startswith("poison"):
                killed.append(self)
                await asyncio.shield(asyncio.ensure_future(self.stop()))
            return await super().serve(request, body)

    async def run() -> None:
        async with stack(6, 1, config={"initial_short": 5}, make_prefill=Mortal) as s:
            # All short requests share a prefix, so that one server gets them all.
            shared = "p" * 1000
            assert (await s.post(text=shared))[0] == 200
            busy = next(p for p in s.prefills if p.bodies)
            busy.gate.clear()
            innocent = [asyncio.create_task(s.post(text=shared)) for _ in range(3)]
            await s.until(lambda: sum(p.running for p in s.prefills) == 3)
            for p in s.prefills:
                p.gate.clear()
            poison = asyncio.create_task(s.post(text="poison"))
            await asyncio.wait((poison,), timeout=120)
            for p in s.prefills:
                p.gate.set()
            async with asyncio.timeout(180):
                assert [status for status, _ in await asyncio.gather(*innocent)] == [200] * 3
                assert (await poison)[0] == 502
            assert len(killed) <= 2

    asyncio.run(run())


@pytest.mark.parametrize(("rid", "status"), [("\ud800", 200), (10**30, 400), (["\ud800", "a"], 200), (["a"], 400)])
def test_router_accepts_any_text_rid_and_rejects_invalid_rids(rid: Any, status: int) -> None:
    async def run() -> None:
        async with stack(2) as s:
            raw = json.dumps({"text": ["a", "b"] if isinstance(rid, list) else "a", "rid": rid})
            async with s.client.post(f"{s.url}/generate", data=raw, headers=JSON_TYPE) as r:
                assert r.status == status, await r.read()
            await s.at_rest()

    asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("rid", ["mine", ["mine", 'yo"urs']])
def test_retry_uses_new_rids_that_client_does_not_see(stream: bool, rid: Any) -> None:
    """A server aborts the id of an attempt a second time, seconds after the attempt has ended."""

    async def run() -> None:
        async with stack(2, decodes=2) as s:
            texts = "a" if isinstance(rid, str) else ["a", "b"]
            s.decodes[0].status = s.decodes[1].status = 200
            failing = s.prefills[0] if s.lb.pools.instances[0].pool == "short" else s.prefills[1]
            failing.status = 503
            async with s.client.post(f"{s.url}/generate", json={"text": texts, "rid": rid, "stream": stream}) as r:
                reply = await r.read()
                assert r.status == 200, reply
            sent = [body["rid"] for f in (*s.prefills, *s.decodes) for body in f.bodies]
            made = {one.removesuffix(".prefill") for x in sent for one in (x if isinstance(x, list) else [x])}
            assert len(made) == 2 * len(rid if isinstance(rid, list) else [rid])
            assert not any(one.encode() in reply for one in made)
            assert not made & {*(rid if isinstance(rid, list) else [rid])}

    asyncio.run(run())
