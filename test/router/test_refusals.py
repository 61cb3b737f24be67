"""Refusals of the router, in the shape of OpenAI's errors, and headers of a request that are not passed on."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from sglang.srt.entrypoints.request_headers import _HEADER_OVERRIDES
from sglang_router_laps.http import app, routes
from sglang_router_laps.request import body as bodies

from .fakes import SHORT, Body, stack
from .test_connections import connection

HEAD = b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"


def refused(answer: bytes, status: int) -> Body:
    """Check that an answer has this status and closes the connection. Return its error."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status)
    assert b"connection: close" in head
    error: Body = json.loads(body)["error"]
    assert error["code"] == status
    assert "\n" not in error["message"]
    return error


def test_hop_by_hop_and_override_headers_are_not_forwarded() -> None:
    assert len(_HEADER_OVERRIDES) == 8
    headers = {**dict.fromkeys(_HEADER_OVERRIDES, "1"), "connection": "X-Hop, keep-alive, content-type", "x-hop": "1"}

    async def run() -> None:
        async with stack(2) as s:
            async with s.client.post(f"{s.url}/generate", json={"text": SHORT}, headers={**headers, "x-end": "1"}) as r:
                assert r.status == 200
            for server in (s.pool("short")[0], s.decodes[0]):
                (seen,) = server.headers
                assert not [name for name in headers if name != "connection" and name in seen]
                assert seen["x-end"] == "1"
                assert seen["content-type"] == "application/json"

    asyncio.run(run())


@pytest.mark.parametrize("name", [b"Upgrade", b"upgrade", b"UPGRADE"])
@pytest.mark.parametrize("apart", [False, True])
def test_router_serves_clients_that_offer_other_protocols(apart: bool, name: bytes) -> None:
    """Java's client offers HTTP/2 so in each request, and sends the body at once."""
    body = json.dumps({"text": SHORT}).encode()
    offer = b"Connection: Upgrade, HTTP2-Settings\r\n" + name + b": h2c\r\nHTTP2-Settings: AAMA\r\n\r\n"
    head = (HEAD % len(body)).removesuffix(b"\r\n") + offer

    async def run() -> None:
        async with stack(2) as s, connection(s.url) as (reader, writer):
            for _ in range(2):
                writer.write(head if apart else head + body)
                if apart:
                    await asyncio.sleep(0.1)
                    writer.write(body)
                assert (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 120)).startswith(b"HTTP/1.1 200 ")
                assert json.loads(await reader.readuntil(b"}}"))["text"] == "t2"
                await s.at_rest()
            for server in (s.pool("short")[0], s.decodes[0]):
                assert not [h for h in ("upgrade", "trailer", "http2-settings") if h in server.headers[0]]

    asyncio.run(run())


def test_concurrent_bodies_share_memory_budget() -> None:
    async def run() -> None:
        async with stack(2) as s:
            s.lb.bodies.limit = 20_000
            async with connection(s.url) as (_, first):
                first.write(HEAD % 15_000 + b'{"text": "' + b"a" * 12_000)
                await s.until(lambda: s.lb.bodies.used > 12_000)
                async with connection(s.url) as (reader, writer):
                    writer.write(HEAD % 15_000 + b'{"text": "' + b"a" * 12_000)
                    assert refused(await asyncio.wait_for(reader.read(), 120), 429)["type"] == "overloaded"
            await s.until(lambda: s.lb.bodies.used == 0)
            assert s.lb.counts.rejected == 1
            assert (await s.post(text="a" * 12_000))[0] == 200
            await s.until(lambda: s.lb.bodies.used == 0)

    asyncio.run(run())


def test_slow_body_returns_408(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "PAUSE_S", 1.0)

    async def run() -> None:
        async with stack(2) as s, connection(s.url) as (reader, writer):

            async def drip() -> None:
                writer.write(HEAD % 100_000)
                while not (reader.at_eof() or writer.is_closing()):
                    writer.write(b" ")
                    await asyncio.sleep(0.02)

            dripping = asyncio.create_task(drip())
            answer = b""
            # A byte sent after the close resets the connection; the answer has arrived long before.
            with contextlib.suppress(ConnectionResetError):
                while came := await asyncio.wait_for(reader.read(1 << 16), 120):
                    answer += came
            assert refused(answer, 408)["type"] == "request_timeout"
            await asyncio.gather(dripping, return_exceptions=True)

    asyncio.run(run())


def test_oversized_body_gets_readable_413_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "LINGER_S", 60.0)

    async def run() -> None:
        async with stack(2, args={"max_payload_size": 100_000}) as s, connection(s.url) as (reader, writer):
            size = 1 << 23
            writer.write(HEAD % size + b" " * size)
            assert refused(await asyncio.wait_for(reader.read(), 120), 413)["type"] == "payload_too_large"

    asyncio.run(run())


def test_request_refused_before_body_closes_connection() -> None:
    async def run() -> None:
        async with stack(2, args={"max_concurrent_requests": 1, "queue_size": 0}) as s:
            for p in s.prefills:
                p.gate.clear()
            held = asyncio.create_task(s.post(text=SHORT))
            await s.until(lambda: s.lb.queue.in_flight == 1)
            async with connection(s.url) as (reader, writer):
                writer.write(HEAD % 15_000 + b'{"text": "')
                assert refused(await asyncio.wait_for(reader.read(), 120), 429)["type"] == "overloaded"
            for p in s.prefills:
                p.gate.set()
            assert (await held)[0] == 200

    asyncio.run(run())


MANY = bodies.PARTS_MAX + 1


@pytest.mark.parametrize(
    ("route", "body", "status"),
    [
        ("generate", {"text": ["a"] * MANY}, 413),
        ("generate", {"text": [1] * MANY}, 413),
        ("generate", {"input_ids": [[1]] * MANY}, 413),
        ("generate", {"input_embeds": [[[1]]] * MANY}, 413),
        ("generate", {"text": "a", "sampling_params": [{}] * MANY}, 413),
        ("v1/completions", {"prompt": [1, *["a"] * MANY]}, 413),
        ("v1/chat/completions", {"messages": [{}] * MANY}, 413),
        ("v1/chat/completions", {"messages": [{"content": [{}] * MANY}]}, 413),
        ("v1/completions", {"prompt": [1] * MANY}, 200),
        ("generate", {"input_ids": [1] * MANY}, 200),
        ("generate", {"input_embeds": [[1]] * MANY}, 200),
    ],
)
def test_body_with_too_many_parts_returns_413(route: str, body: Body, status: int) -> None:
    async def run() -> None:
        async with stack(2) as s:
            found, reply = await s.post(route, **body)
            assert found == status
            if status == 413:
                assert str(bodies.PARTS_MAX) in reply["error"]["message"]
                assert not s.decodes[0].bodies

    asyncio.run(run())


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nowhere", 404),
        ("POST", "/v1/nowhere", 404),
        ("GET", "/generate", 405),
        ("PUT", "/v1/chat/completions", 405),
        ("POST", "/laps_status", 405),
        ("GET", "/abort_request", 405),
        ("POST", "/generate", 422),
    ],
)
def test_unsupported_requests_return_openai_errors(method: str, path: str, status: int) -> None:
    async def run() -> None:
        async with stack(2) as s:
            async with s.client.request(method, s.url + path, data=b"x") as r:
                assert r.status == status
                error = (await r.json())["error"]
            assert (error["code"], error["type"]) == (status, "invalid_request_error")
            assert s.lb.counts.refused == 1

    asyncio.run(run())


def test_trailing_slash_is_redirected() -> None:
    async def run() -> None:
        async with stack(2) as s:
            async with s.client.post(f"{s.url}/generate/", json={"text": SHORT}, allow_redirects=False) as r:
                assert (r.status, r.headers["location"]) == (307, f"{s.url}/generate")
            async with s.client.post(f"{s.url}/generate/", json={"text": SHORT}) as r:
                assert r.status == 200, "as curl -L and all clients follow it"
            async with s.client.get(f"{s.url}/nowhere/", allow_redirects=False) as r:
                assert r.status == 404

    asyncio.run(run())


def test_internal_error_returns_500_and_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "PAGE", Path("nowhere.html"))

    async def run() -> None:
        async with stack(2) as s:
            async with s.client.get(f"{s.url}/laps") as r:
                assert r.status == 500
                assert (await r.json())["error"]["type"] == "internal_error"
                assert r.headers["x-request-id"] in (await r.json())["error"]["message"]
            assert s.lb.counts.failed == 1
            assert (await s.post(text=SHORT))[0] == 200

    asyncio.run(run())


@pytest.mark.parametrize("last", ["9" * 5000, "99999999999", "3", "٣"])
def test_status_accepts_any_number_of_history_samples(last: str) -> None:
    async def run() -> None:
        async with stack(2) as s, s.client.get(f"{s.url}/laps_status?history=1&last={last}") as r:
            assert r.status == 200

    asyncio.run(run())


def test_deeply_nested_rid_returns_400() -> None:
    rid: Any = "a"
    for _ in range(500):
        rid = [rid]

    async def run() -> None:
        async with stack(2) as s:
            status, reply = await s.post(text=SHORT, rid=rid)
            assert status == reply["error"]["code"] == 400
            assert s.lb.counts.refused == 1
            await s.at_rest()

    asyncio.run(run())


def test_rid_cannot_forge_log_line(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with stack(2) as s:
            s.decodes[0].break_after = 0
            s.decodes[0].chunks = 2
            async with s.client.post(
                f"{s.url}/generate", json={"text": SHORT, "stream": True, "rid": "a\nforged\u2028line"}
            ) as r:
                await r.read()
            await s.at_rest()

    with caplog.at_level(logging.INFO):
        asyncio.run(run())
    told = [r.getMessage() for r in caplog.records]
    assert any("ClientPayloadError" in line for line in told), "the server that broke off is told"
    assert not any("forged" in line for line in told)
