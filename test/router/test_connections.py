"""Clients with unusual HTTP: pipelined requests, heads that never end, answers that are not read."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from rounds import repeat_until
from sglang_router_laps.http import parser

from .fakes import JSON_TYPE, SHORT, FakeDecode, Stack, stack
from .test_own_limits import open_ports, separate_router

GET = b"GET /liveness HTTP/1.1\r\nhost: x\r\n\r\n"
SPACE = 4 << 30
"""Limit of a router's address space (bytes)."""
RESIDENT = 300 << 20
"""Most memory that a router may need beyond the import of SGLang by the stock module (bytes)."""


def post(**body: Any) -> bytes:
    raw = json.dumps(body).encode()
    head = b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % len(raw) + raw


@contextlib.asynccontextmanager
async def connection(url: str, **options: Any) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port), **options)
    try:
        yield reader, writer
    finally:
        writer.close()


def resident(pid: int) -> int:
    """Return the resident memory of a process (bytes)."""
    line = next(x for x in Path(f"/proc/{pid}/status").read_text().splitlines() if x.startswith("VmRSS"))
    return int(line.split()[1]) << 10


def used_s(pid: int) -> float:
    """Return the CPU time of a process (seconds), which does not depend on other processes."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def test_pipelined_requests_use_bounded_memory_and_block_no_client(tmp_path: Path) -> None:
    async def flood(url: str) -> None:
        with contextlib.suppress(ConnectionError):
            async with connection(url) as (reader, writer):
                writer.write(GET * 3000)
                await writer.drain()
                while await reader.read(1 << 16):
                    pass

    async def run() -> None:
        async with stack(2) as s, separate_router(s, None, tmp_path, space=SPACE) as (pid, url):
            start, most, slowest = resident(pid), 0, 0.0
            floods = asyncio.gather(*(flood(url) for _ in range(300)))
            async with asyncio.timeout(120):
                while not floods.done():
                    began = used_s(pid)
                    async with s.client.get(f"{url}/liveness") as r:
                        assert r.status == 200
                    slowest, most = max(slowest, used_s(pid) - began), max(most, resident(pid))
                    await asyncio.sleep(0.01)
            await floods
            async with s.client.post(f"{url}/generate", json={"text": SHORT}) as r:
                assert r.status == 200
            print(f"slowest {slowest:.3f} s, {start >> 20} MiB at the start and {most >> 20} at most")
            assert slowest < 1
            assert most < RESIDENT

    asyncio.run(run())


@pytest.mark.parametrize("behind", [b"", GET, b"nonsense\r\n\r\n", b"\r\n"], ids=["nothing", "get", "nonsense", "line"])
def test_disconnect_is_detected_despite_pipelined_bytes(behind: bytes) -> None:
    async def run() -> None:
        async with stack(2, make_decode=lambda w: FakeDecode(w, chunks=10_000, pause_s=0.02)) as s:
            async with connection(s.url) as (reader, writer):
                writer.write(post(text=SHORT, stream=True, rid="one"))
                await reader.readuntil(b"t0")
                writer.write(behind)
                await reader.readuntil(b"t5")
            await s.until(lambda: s.lb.counts.disconnected == 1 and bool(s.decodes[0].aborted))
            await s.at_rest()

    asyncio.run(run())


def test_router_answers_first_pipelined_request_and_closes_connection() -> None:
    async def run() -> None:
        async with stack(2) as s, connection(s.url) as (reader, writer):
            writer.write(post(text=SHORT) + post(text=SHORT) + GET + b"GET / nonsense\r\n\r\n")
            answer = await asyncio.wait_for(reader.read(), 120)
            assert answer.count(b"HTTP/1.1 ") == 1
            assert answer.startswith(b"HTTP/1.1 200 ")
            assert b"connection: close" in answer
            assert answer.endswith(b"}")
            assert len(s.decodes[0].bodies) == 1
            await s.at_rest()

    asyncio.run(run())


def test_sequential_requests_share_connection() -> None:
    async def run() -> None:
        async with stack(2) as s, connection(s.url) as (reader, writer):
            for _ in range(3):
                # Old clients send a superfluous empty line after a body.
                writer.write(post(text=SHORT) + b"\r\n")
                await asyncio.wait_for(reader.readuntil(b'"id"'), 120)
                await reader.readuntil(b"}}")
                await s.at_rest()
            assert len(s.decodes[0].bodies) == 3

    asyncio.run(run())


def test_chunked_trailers_are_ignored() -> None:
    async def run() -> None:
        async with stack(2) as s, connection(s.url) as (reader, writer):
            body = b'{"text":"a"}'
            head = [b"POST /generate HTTP/1.1", b"host: x", b"transfer-encoding: chunked", b"x-head: yes"]
            head += [b"content-type: application/json"]
            tail = [b"0", b"x-sgl-ttft-slo-ms: nonsense", b"x-tail: yes", b"connection: close"]
            pieces = [*head, b"", b"%x" % len(body), body, *tail, b"", b""]
            writer.write(b"\r\n".join(pieces))
            assert (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 120)).startswith(b"HTTP/1.1 200 ")
            for server in (s.pool("short")[0], s.decodes[0]):
                assert "x-tail" not in server.headers[0]
                assert server.headers[0]["x-head"] == "yes"

    asyncio.run(run())


def small() -> socket.socket:
    """Return a socket with a small receive buffer."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    return sock


async def unread(s: Stack, data: bytes) -> socket.socket:
    """Return the connection of a client that has sent ``data`` and reads nothing."""
    sock = small()
    sock.setblocking(False)
    host, port = s.url.removeprefix("http://").split(":")
    loop = asyncio.get_running_loop()
    await loop.sock_connect(sock, (host, int(port)))
    await loop.sock_sendall(sock, data)
    return sock


class Streaming(FakeDecode):
    """Decode server whose stream a subclass writes."""

    async def stream(self, request: Any, body: Any) -> Any:
        """Start the stream, once the prefill server has the request, too."""
        from aiohttp import web

        await self.world.event(body["bootstrap_room"]).wait()
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        return response


class Flooding(Streaming):
    """Decode server with an endless stream of 64 KiB events."""

    async def serve(self, request: Any, body: Any) -> Any:
        if "fill" not in body:
            return await super().serve(request, body)
        response = await self.stream(request, body)
        while True:
            await response.write(b"data: " + b"x" * (1 << 16) + b"\n\n")


def test_unread_streams_release_slots() -> None:
    async def run() -> None:
        args = {"max_concurrent_requests": 2, "request_timeout_secs": 5, "queue_size": 0}
        async with stack(2, args=args, make_decode=Flooding) as s:
            socks = [await unread(s, post(text=SHORT, stream=True, fill=True)) for _ in range(2)]
            await s.until(lambda: len(s.decodes[0].bodies) == 2)
            await s.until(lambda: s.lb.queue.in_flight == 0, timeout=120)
            await s.at_rest()
            await s.until(lambda: len(s.decodes[0].aborted) == 2 and not s.decodes[0].running)
            assert (await s.post(text=SHORT))[0] != 429
            for sock in socks:
                sock.close()

    asyncio.run(run())


class Late(Streaming):
    """Decode server that streams hardly anything for three seconds, then an endless stream."""

    async def serve(self, request: Any, body: Any) -> Any:
        response = await self.stream(request, body)
        for _ in range(30):
            await response.write(b"data: 0\n\n")
            await asyncio.sleep(0.1)
        while True:
            await response.write(b"data: " + b"x" * (1 << 16) + b"\n\n")


def test_unread_stream_that_stalls_late_ends_at_request_timeout() -> None:
    async def run() -> bool:
        args = {"max_concurrent_requests": 2, "request_timeout_secs": 5, "queue_size": 0}
        async with stack(2, args=args, make_decode=Late) as s:
            loop = asyncio.get_running_loop()
            begin = loop.time()
            sock = await unread(s, post(text=SHORT, stream=True))
            await s.until(lambda: len(s.decodes[0].bodies) == 1)
            await s.until(lambda: s.lb.queue.in_flight == 0)
            took_s = loop.time() - begin
            await s.at_rest()
            sock.close()
            return took_s < 7.5

    repeat_until(lambda _: asyncio.run(run()), "it is not waited for as long again as it has taken")


class Large(FakeDecode):
    """Decode server with whole answers of 16 MiB."""

    async def serve(self, request: Any, body: Any) -> Any:
        from aiohttp import web

        await self.world.event(body["bootstrap_room"]).wait()
        return web.json_response({"text": "x" * (1 << 24)})


def test_unread_non_streaming_answer_closes_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parser, "STALL_S", 0.5)

    async def run() -> None:
        async with stack(2, make_decode=Large) as s:
            sock = await unread(s, post(text=SHORT))
            await s.until(lambda: len(s.decodes[0].bodies) == 1)
            await s.at_rest()
            port = sock.getsockname()[1]
            await s.until(lambda: port not in open_ports(os.getpid()))
            sock.close()

    asyncio.run(run())


def test_slow_reader_gets_whole_answer_after_keep_alive_time() -> None:
    async def run() -> None:
        config = {"keep_alive_s": 0.2}
        async with stack(2, config=config, make_decode=Large) as s, connection(s.url) as (reader, writer):
            writer.write(post(text=SHORT))
            answer = await asyncio.wait_for(reader.readuntil(b"xx"), 120)
            await s.at_rest()
            await asyncio.sleep(1.0)
            answer += await asyncio.wait_for(reader.read(), 120)
            assert len(answer) > 1 << 24
            assert answer.endswith(b'x"}')

    asyncio.run(run())


@pytest.mark.parametrize("part", [b"", b"GET /liveness HTTP/1.1\r\nho"], ids=["nothing", "head"])
def test_incomplete_request_head_closes_connection(part: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parser, "HEAD_S", 0.3)

    async def run() -> None:
        async with stack(2, config={"keep_alive_s": 0.5}) as s, connection(s.url) as (reader, writer):
            writer.write(part)
            answer = await asyncio.wait_for(reader.read(), 120)
            if part:
                assert answer.startswith(b"HTTP/1.1 408 ")
                assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["type"] == "request_timeout"
            else:
                assert not answer

    asyncio.run(run())


def test_invalid_http_returns_400_in_openai_error_format() -> None:
    async def run() -> None:
        async with stack(2) as s, connection(s.url) as (reader, writer):
            writer.write(b"nonsense\r\n\r\n")
            head, _, body = (await asyncio.wait_for(reader.read(), 120)).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 400 ")
            assert json.loads(body)["error"]["code"] == 400
            assert JSON_TYPE["content-type"].encode() in head

    asyncio.run(run())
