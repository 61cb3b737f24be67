"""Bodies that arrive in part or not at all, or are too large."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import pytest

from .fakes import Stack, stack


class Half:
    """Client that sends the head of a request and a part of its body, then nothing more."""

    def __init__(self, head: bytes, part: bytes) -> None:
        self._data = head + part
        self.writer: asyncio.StreamWriter | None = None

    async def send(self, s: Stack) -> asyncio.StreamReader:
        host, port = s.url.removeprefix("http://").split(":")
        reader, self.writer = await asyncio.open_connection(host, int(port))
        self.writer.write(self._data)
        await self.writer.drain()
        return reader


HEAD = b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 1000\r\n\r\n"


def test_incomplete_bodies_take_no_slot() -> None:
    async def run() -> None:
        async with stack(2, args={"max_concurrent_requests": 3}) as s:
            halves = [Half(HEAD, b'{"text": "') for _ in range(10)]
            for half in halves:
                await half.send(s)
            for _ in range(3):
                assert (await s.post(text="a"))[0] == 200
            await s.at_rest()
            for half in halves:
                assert half.writer
                half.writer.close()
            await s.until(lambda: s.lb.counts.disconnected == 10)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("head", "more"),
    [
        (b"GET /health HTTP/1.1\r\nhost: x\r\nlong: ", b"x" * 1000),
        (b"GET /health HTTP/1.1\r\nhost: x\r\n", b"many: headers\r\n" * 100),
        (b"GET /", b"health" * 100),
        (b'POST /generate HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n5\r\n{"a":\r\n5;', b"x" * 1000),
        (b"POST /generate HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n0\r\n", b"x: y\r\n" * 100),
    ],
    ids=["header", "headers", "address", "chunk", "trailers"],
)
def test_endless_http_framing_data_ends_connection(head: bytes, more: bytes) -> None:
    async def run() -> None:
        async with stack(2) as s:
            half = Half(head, b"")
            reader = await half.send(s)
            assert half.writer
            sent = 0
            with suppress(ConnectionError):
                while not reader.at_eof() and sent < 1 << 23:
                    half.writer.write(more)
                    await half.writer.drain()
                    sent += len(more)
            assert sent < 1 << 23
            half.writer.close()
            assert (await s.post(text="a"))[0] == 200

    asyncio.run(run())


def test_large_body_sent_with_head_works_on_reused_connection() -> None:
    async def run() -> None:
        async with stack(2) as s:
            body = b'{"text": "%s", "sampling_params": {}}' % (b"a " * 200_000)
            whole = HEAD.replace(b"1000", b"%d" % len(body)) + body
            half = Half(whole, b"")
            reader = await half.send(s)
            assert half.writer
            for _ in range(2):
                head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 120)
                assert head.startswith(b"HTTP/1.1 200 ")
                await reader.readexactly(int(head.split(b"content-length: ")[1].split()[0]))
                half.writer.write(whole)
            half.writer.close()
            await s.until(lambda: s.lb.queue.in_flight == 0)

    asyncio.run(run())


def test_incomplete_body_returns_408_and_closes_connection() -> None:
    async def run() -> None:
        async with stack(2, args={"request_timeout_secs": 0.3}) as s:
            half = Half(HEAD, b'{"text": "')
            reader = await half.send(s)
            answer = await asyncio.wait_for(reader.read(), 120)
            assert answer.startswith(b"HTTP/1.1 408 ")
            assert s.lb.counts.refused == 1
            assert half.writer
            half.writer.close()

    asyncio.run(run())


def test_body_above_max_payload_size_returns_413() -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield b'{"text": "'
        for _ in range(100):
            yield b"a" * 100
        yield b'"}'

    async def run() -> None:
        async with stack(2, args={"max_payload_size": 5000}) as s:
            bodies: tuple[Any, ...] = (b'{"text": "%b"}' % (b"a" * 5000), pieces())
            for body in bodies:
                async with s.client.post(f"{s.url}/generate", data=body) as response:
                    assert response.status == 413
                    assert "5000 bytes" in (await response.json())["error"]["message"]
            assert (await s.post(text="a" * 4000))[0] == 200
            await s.at_rest()
            assert sum(len(p.bodies) for p in s.prefills) == 1

    asyncio.run(run())
