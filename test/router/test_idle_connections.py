"""Idle connections that a server, or the router, closes while a request comes on them."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from pathlib import Path

import pytest
from aiohttp import web

from .fakes import NO_PROBES, SHORT, FakeDecode, FakePrefill, FakeServer, World, stack
from .test_connections import GET
from .test_own_limits import separate_router


class Closing(FakeServer):
    """Server that closes a connection when a second request comes: its limit for idle connections is short."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.closed = 0
        self._seen: set[object] = set()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        transport = request.transport
        assert transport is not None
        if transport in self._seen:
            self.closed += 1
            transport.abort()
            return web.Response()
        self._seen.add(transport)
        return await super()._handle(request)


class ClosingPrefill(Closing, FakePrefill):
    """Prefill server of this kind."""


class ClosingDecode(Closing, FakeDecode):
    """Decode server of this kind."""


@pytest.mark.parametrize("stream", [False, True])
def test_request_on_closed_connection_is_sent_again_on_new_one(stream: bool) -> None:
    async def run() -> None:
        async with stack(1, args=NO_PROBES, make_prefill=ClosingPrefill, make_decode=ClosingDecode) as s:
            # Several connections are idle at a time: all of them are closed.
            await asyncio.gather(*(s.post(text=SHORT) for _ in range(4)))
            for _ in range(6):
                async with s.client.post(f"{s.url}/generate", json={"text": SHORT, "stream": stream}) as r:
                    assert r.status == 200
                    assert b"error" not in await r.read()
            await s.at_rest()
            found = await s.status()
            servers = s.prefills[0], s.decodes[0]
            assert all(isinstance(f, Closing) and f.closed for f in servers)
            assert [len(f.bodies) for f in servers] == [10, 10]
            assert found["counts"]["retried"] == 0
            assert [(i["lost"], i["healthy"]) for i in (*found["prefill"], *found["decode"])] == [(0, True)] * 2

    asyncio.run(run())


class Dying(FakePrefill):
    """Prefill server that a request can end."""

    async def serve(self, request: web.Request, body: object) -> web.StreamResponse:
        if isinstance(body, dict) and "end" in body:
            await self.stop()
        return await super().serve(request, body)  # type: ignore[arg-type]


def test_request_that_ends_server_is_lost_also_on_idle_connection() -> None:
    async def run() -> None:
        async with stack(1, args=NO_PROBES, make_prefill=Dying) as s:
            assert (await s.post(text=SHORT))[0] == 200
            status, reply = await s.post(text=SHORT, end=True)
            assert (status, reply["error"]["type"]) == (502, "upstream_lost")

    asyncio.run(run())


def test_request_that_came_during_standstill_is_answered(tmp_path: Path) -> None:
    def connect(url: str) -> list[socket.socket]:
        host, port = url.removeprefix("http://").split(":")
        there = [socket.create_connection((host, int(port))) for _ in range(200)]
        for sock in there:
            ask(sock)
        return there

    def ask(sock: socket.socket) -> None:
        sock.settimeout(60)
        sock.sendall(GET)
        read(sock)

    def read(sock: socket.socket) -> None:
        answer = b""
        while not answer.endswith(b"alive"):
            part = sock.recv(4096)
            assert part, answer
            answer += part

    async def run() -> None:
        config = '{"keep_alive_s": 2.0}'
        async with stack(1) as s, separate_router(s, None, tmp_path, "--laps-alloc-config", config) as (pid, url):
            clients = await asyncio.to_thread(connect, url)
            await asyncio.sleep(1.0)
            os.kill(pid, signal.SIGSTOP)
            try:
                await asyncio.sleep(0.3)
                for sock in clients:
                    sock.sendall(GET)
                # Meanwhile the time limit of all idle connections passes.
                await asyncio.sleep(2.0)
            finally:
                os.kill(pid, signal.SIGCONT)
            for sock in clients:
                await asyncio.to_thread(read, sock)
                sock.close()

    asyncio.run(run())
