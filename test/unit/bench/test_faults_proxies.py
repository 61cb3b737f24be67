"""Proxies over real sockets: a client's view of a faulty server, and the recorded evidence."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from http.client import HTTPConnection, HTTPException

import pytest
from faults import proxies, wire
from faults.evidence import DIED, MARKER, Evidence
from faults.proxies import Proxy

from benchmark.rig.servers import free_port

CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
PIECES = 6


class ProxiedServer:
    """A streaming server with a proxy in front."""

    proxy: Proxy

    def __init__(self) -> None:
        self.evidence = Evidence()
        self.gate = asyncio.Event()
        self.gate.set()
        self.asked = asyncio.Event()
        self.left = asyncio.Event()
        self.events = False
        """True to send the pieces as events."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                await reader.readuntil(b"\r\n\r\n")
                self.asked.set()
                writer.write(CHUNKED)
                for i in range(PIECES):
                    piece = b"data: %d\n\n" % i if self.events else b"%d" % i
                    writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
                    await writer.drain()
                    await asyncio.sleep(0.02)
                    if i == 0:
                        await self.gate.wait()
                writer.write(b"0\r\n\r\n")
        self.left.set()
        writer.close()

    async def ask(self, number: int = 1) -> tuple[int, bytes]:
        with self.connection() as connection:
            return await self.ask_on(connection, number)

    def connection(self) -> contextlib.closing[HTTPConnection]:
        """Return a connection that can be reused."""
        return contextlib.closing(HTTPConnection("127.0.0.1", self.proxy.port, timeout=120))

    async def ask_on(self, connection: HTTPConnection, number: int = 1) -> tuple[int, bytes]:
        def ask() -> tuple[int, bytes]:
            connection.request("POST", "/x", b"", {MARKER: str(number)})
            reply = connection.getresponse()
            return reply.status, reply.read()

        return await asyncio.to_thread(ask)

    def what(self, number: int = 1) -> list[str]:
        return [h.what for h in self.evidence.hits(number)]


@contextlib.asynccontextmanager
async def bench() -> AsyncIterator[ProxiedServer]:
    b = ProxiedServer()
    server = await asyncio.start_server(b.serve, "127.0.0.1", 0)
    b.proxy = Proxy("p", free_port(), server.sockets[0].getsockname()[1], b.evidence, seed=1)
    await b.proxy.listen()
    try:
        yield b
    finally:
        await b.proxy.close()
        server.close()


ALL = (200, b"012345")
BROKEN = (OSError, HTTPException)


def test_proxy_forwards_and_keeps_connections() -> None:
    async def run() -> None:
        async with bench() as b:
            with b.connection() as connection:
                assert await b.ask_on(connection, 1) == ALL
                assert await b.ask_on(connection, 2) == ALL
            assert b.what(1) == b.what(2) == ["sent", "answered 200"]
            await asyncio.wait_for(b.left.wait(), 60)  # the server notices that its client has gone

    asyncio.run(run())


def test_proxy_refuses_and_recovers() -> None:
    async def run() -> None:
        async with bench() as b:
            with b.connection() as kept:
                assert await b.ask_on(kept) == ALL
                await b.proxy.mode(proxies.REFUSE)
                with pytest.raises(ConnectionRefusedError):
                    await b.ask()
                with pytest.raises(BROKEN):
                    await b.ask_on(kept)
            await b.proxy.mode(proxies.PASS)
            assert await b.ask() == ALL

    asyncio.run(run())


@pytest.mark.parametrize("taken", [False, True])
def test_unread_request_is_reset_and_recorded(taken: bool) -> None:
    """``taken``: the proxy has accepted the connection; otherwise only the kernel has."""

    async def run() -> None:
        async with bench() as b:
            with contextlib.closing(socket.create_connection(("127.0.0.1", b.proxy.port), timeout=60)) as sent:
                while taken and not b.proxy._links:
                    await asyncio.sleep(0.01)
                sent.sendall(b"POST /x HTTP/1.1\r\n%b: 7\r\n\r\n" % MARKER.encode())
                b.proxy.refuse()
                with pytest.raises(ConnectionResetError):
                    await asyncio.to_thread(sent.recv, 1)
            assert b.what(7) == [DIED]

    asyncio.run(run())


def test_running_request_continues_while_proxy_refuses() -> None:
    async def run() -> None:
        async with bench() as b:
            b.gate.clear()
            asked = asyncio.ensure_future(b.ask())
            await asyncio.wait_for(b.asked.wait(), 60)
            b.proxy.refuse()
            b.gate.set()
            assert await asked == ALL

    asyncio.run(run())


def test_resets_before_or_after_forwarding_are_recorded() -> None:
    async def run() -> None:
        async with bench() as b:
            await b.proxy.mode(proxies.RESET)
            for i in range(20):
                with pytest.raises(BROKEN):
                    await b.ask(i)
            noted = [b.what(i) for i in range(20)]
            assert all("reset" in n for n in noted)
            assert {"sent" in n for n in noted} == {True, False}
            await b.proxy.mode(proxies.PASS)
            assert await b.ask() == ALL

    asyncio.run(run())


def test_silence_stalls_running_requests_and_ends_with_reset() -> None:
    async def run() -> None:
        async with bench() as b:
            b.gate.clear()
            old = asyncio.ensure_future(b.ask(1))
            await asyncio.wait_for(b.asked.wait(), 60)
            await b.proxy.mode(proxies.SILENT)
            b.gate.set()
            new = asyncio.ensure_future(b.ask(2))
            _, waiting = await asyncio.wait((old, new), timeout=0.3)
            assert waiting == {old, new}
            await b.proxy.mode(proxies.PASS)
            for task in (old, new):
                with pytest.raises(BROKEN):
                    await asyncio.wait_for(task, 60)
            assert b.what(1)[-1] == b.what(2)[-1] == "silent"
            assert await b.ask(3) == ALL

    asyncio.run(run())


def test_stream_hangs_midway_while_server_is_healthy() -> None:
    async def run() -> None:
        async with bench() as b:
            b.events = True
            await b.proxy.mode(proxies.HANG)
            hung = [asyncio.ensure_future(b.ask(i)) for i in range(2)]
            while not all("hang" in b.what(i) for i in range(2)):
                await asyncio.sleep(0.01)
            b.events = False
            assert await b.ask(7) == ALL  # a reply that is no stream passes
            await b.proxy.mode(proxies.PASS)
            b.events = True
            assert (await b.ask(8))[0] == 200
            _, waiting = await asyncio.wait(hung, timeout=0.2)
            assert waiting == {*hung}
            assert b.what(1) == ["sent", "answered 200", "hang"]
        await asyncio.gather(*hung, return_exceptions=True)

    asyncio.run(run())


def test_storm_replies_without_asking_server() -> None:
    async def run() -> None:
        async with bench() as b:
            await b.proxy.mode(proxies.STORM)
            with b.connection() as connection:
                answers = [await b.ask_on(connection, i) for i in range(12)]
            assert {status for status, _ in answers} == {500, 502, 503}
            assert all(wire.reason(body) for _, body in answers)
            assert not b.asked.is_set()
            assert b.what(0) == ["storm"]

    asyncio.run(run())


@pytest.mark.parametrize(("waits_s", "still"), [(1.0, False), (3.0, True)])
def test_server_with_long_waiting_probe_counts_as_stalled(waits_s: float, still: bool) -> None:
    """A server stands still while the router waits for a probe. The router's own reaction is no evidence."""

    async def run() -> None:
        now, probed, asked = 100.0, 0.0, asyncio.Event()
        evidence = Evidence(clock=lambda: now)

        async def serve(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            asked.set()
            await reader.read()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        proxy = Proxy("p", free_port(), server.sockets[0].getsockname()[1], evidence)
        await proxy.listen()
        _, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(b"GET /health HTTP/1.1\r\n\r\n")
        await asked.wait()
        probed, now = now, now + waits_s
        writer.close()
        await writer.wait_closed()
        await proxy.close()
        server.close()
        told = [(w.kind, w.server, w.begin, w.end) for w in evidence.windows]
        assert told == ([("still", "p", probed, now)] if still else [])

    asyncio.run(run())
