"""Rights to abort and to flush; a request without the right has no effect."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from .fakes import NO_PROBES, SHORT, Stack, events_of, stack
from .test_aborts import ask_abort, strict

ADMIN = {"Authorization": "Bearer admin"}


@asynccontextmanager
async def guarded(prefills: int = 2, decodes: int = 1, args: Any = None) -> AsyncIterator[Stack]:
    """Run servers with an admin key that the router knows."""
    async with strict(prefills, decodes, args={"api_key": "admin", **(args or {})}) as s:
        for f in (*s.prefills, *s.decodes):
            f.admin_key = "admin"
        yield s


def test_disconnects_and_unauthorized_aborts_end_no_other_stream() -> None:
    """SGLang ends every request whose id starts with the aborted id, and the router's key permits that."""

    async def run() -> None:
        async with guarded() as s, aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as leaving:
            (decode,) = s.decodes
            for p in s.prefills:
                p.gate.clear()
            body = {"text": SHORT, "stream": True}

            async def stream() -> list[str]:
                async with s.client.post(f"{s.url}/generate", json=body) as r:
                    return await events_of(r)

            whole = [asyncio.create_task(stream()) for _ in range(64)]
            left = [
                asyncio.create_task(leaving.post(f"{s.url}/generate", json={**body, "rid": digit}))
                for digit in "0123456789abcdef"
            ]
            await s.until(lambda: decode.running == sum(p.running for p in s.prefills) == 80)
            for task in left:
                task.cancel()
            await s.until(lambda: len(decode.aborted) >= 16 and sum(len(p.aborted) for p in s.prefills) >= 16)
            assert (await ask_abort(s, {"abort_all": True}))[0] == 401
            assert (await ask_abort(s, {"rid": "0"}))[0] == 401
            for p in s.prefills:
                p.gate.set()
            for events in await asyncio.gather(*whole):
                assert (len(events), events[-1]) == (4, "[DONE]")
            await s.at_rest()
            assert len(decode.aborted) == 16

    asyncio.run(run())


def test_abort_permission_is_checked_at_reachable_server() -> None:
    """Whichever server has just gone."""

    async def run(gone: int) -> None:
        async with guarded(2, 2, args={"api_key": None, **NO_PROBES}) as s:
            for servers in (s.prefills, s.decodes):
                await servers[gone].stop()
            assert (await ask_abort(s, {"abort_all": True}))[0] == 401

    for gone in range(2):
        asyncio.run(run(gone))


def test_only_authorized_abort_all_ends_queued_and_running_requests() -> None:
    async def run() -> None:
        async with guarded(args={"max_concurrent_requests": 1}) as s:
            for p in s.prefills:
                p.gate.clear()
            first = asyncio.create_task(s.post(text=SHORT))
            await s.until(lambda: s.decodes[0].running == 1)
            second = asyncio.create_task(s.post(text=SHORT))
            await s.until(lambda: s.lb.queue.waiting == 1)
            assert (await ask_abort(s, {"abort_all": True}))[0] == 401
            assert not second.done()
            assert not any(f.aborted for f in (*s.prefills, *s.decodes))
            assert (await ask_abort(s, {"abort_all": True}, headers=ADMIN))[0] == 200
            status, reply = await second
            assert (status, reply["error"]["type"]) == (400, "abort")
            status, reply = await first
            assert (status, reply["meta_info"]["finish_reason"]["type"]) == (200, "abort")
            await s.at_rest()

    asyncio.run(run())


def test_request_is_retried_after_unauthorized_abort() -> None:
    async def run() -> None:
        async with guarded() as s:
            short, long = s.pool("short")[0], s.pool("long")[0]
            short.gate.clear()
            short.status = 503
            sent = asyncio.create_task(s.post(text=SHORT, rid="mine"))
            await s.until(lambda: short.running == 1)
            assert (await ask_abort(s, {"rid": "mine"}))[0] == 401
            short.gate.set()
            assert (await sent)[0] == 200
            assert len(long.bodies) == 1

    asyncio.run(run())


def test_abort_between_retries_ends_request() -> None:
    minute = {"retry_initial_backoff_ms": 60_000, "retry_max_backoff_ms": 60_000}

    async def run() -> None:
        async with guarded(args=minute) as s:
            for p in s.prefills:
                p.status = 503
            sent = asyncio.create_task(s.post(text=SHORT, rid="mine"))
            await s.until(lambda: s.lb.counts.retried == 1)
            assert (await ask_abort(s, {"rid": "mine"}, headers=ADMIN))[0] == 200
            status, reply = await asyncio.wait_for(sent, 120)
            assert (status, reply["error"]["type"]) == (400, "abort")
            assert sum(len(p.bodies) for p in s.prefills) == 1
            await s.at_rest()

    asyncio.run(run())


def test_abort_ends_request_waiting_for_decode_server() -> None:
    async def run() -> None:
        async with strict(args=NO_PROBES) as s:
            (decode,) = s.lb.decoders
            decode.healthy = False
            sent = asyncio.create_task(s.post(text=SHORT, rid="mine"))
            await s.until(lambda: s.lb.queue.waiting == 1)
            # A server of the other role decides whether the client may abort.
            assert (await ask_abort(s, {"rid": "mine"}))[0] == 200
            decode.healthy = True
            status, reply = await sent
            assert (status, reply["error"]["type"]) == (400, "abort")
            assert not s.decodes[0].bodies
            await s.at_rest()

    asyncio.run(run())


def test_abort_without_json_content_type_is_refused() -> None:
    """A web page could send such a request, without a CORS preflight, to a router in its reader's network."""

    async def run() -> None:
        async with strict() as s:
            for p in s.prefills:
                p.gate.clear()
            sent = asyncio.create_task(s.post(text=SHORT, rid="mine"))
            await s.until(lambda: s.decodes[0].running == 1)
            text = {"content-type": "text/plain"}
            async with s.client.post(f"{s.url}/abort_request", data=b'{"abort_all":true}', headers=text) as r:
                assert r.status == 422
            for p in s.prefills:
                p.gate.set()
            assert (await sent)[0] == 200

    asyncio.run(run())


def test_prefix_index_is_cleared_only_by_accepted_flush() -> None:
    async def run() -> None:
        async with stack(2) as s:
            await s.post(text="z" * 8000)
            known = [len(i.prefixes) for i in s.lb.pools.instances]
            assert any(known)
            for f in (*s.prefills, *s.decodes):
                f.flush_status = 401
            async with s.client.post(f"{s.url}/flush_cache") as r:
                assert r.status == 401
            assert [len(i.prefixes) for i in s.lb.pools.instances] == known
            # A page of another site cannot declare a body as JSON without a CORS preflight.
            before = s.prefills[0].flushed
            async with s.client.post(f"{s.url}/flush_cache", headers={"origin": "http://else.where"}) as r:
                assert r.status == 422
            assert s.prefills[0].flushed == before
            for f in (*s.prefills, *s.decodes):
                f.flush_status = 200
            async with s.client.post(f"{s.url}/flush_cache") as r:
                assert r.status == 200
            assert not any(len(i.prefixes) for i in s.lb.pools.instances)

    asyncio.run(run())


@pytest.mark.parametrize("header", ["x-override-rid", "X-Override-Rid"])
def test_override_rid_header_is_not_forwarded(header: str) -> None:
    async def run() -> None:
        async with stack(2) as s:
            async with s.client.post(f"{s.url}/generate", json={"text": SHORT}, headers={header: "0"}) as r:
                assert r.status == 200
            seen = [h for f in (*s.prefills, *s.decodes) for h in f.headers]
            assert len(seen) == 2
            assert not any(header in h for h in seen)

    asyncio.run(run())
