"""Emulated prefill instances: each processes one request at a time at a fixed speed, and reports the status of a LAPS
server."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web
from laps_core.protocol import POOL_ROUTE, STATUS_ROUTE, Load, PoolChange, PoolRecord, Status, read

from benchmark.rig import servers

Rooms = defaultdict[int, asyncio.Event]


class EmulatedPrefill:
    """An emulated server whose device processes one prompt at a time."""

    def __init__(self, rooms: Rooms, speed: float) -> None:
        self.rooms = rooms
        self.speed = speed
        self.backlog = 0
        self.busy_s = 0.0
        self.since: float | None = None
        """Start of the current prompt, which ``busy_s`` does not include."""
        self.seen = (time.perf_counter(), 0.0)
        self.device = asyncio.Lock()
        self.record = PoolRecord()
        self.moves: list[tuple[float, str]] = []
        """Times at which the record was set to another pool (seconds since 1970), and that pool."""

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        tokens = len(body["input_ids"])
        self.backlog += tokens
        try:
            async with self.device:
                self.since = time.perf_counter()
                await asyncio.sleep(tokens / self.speed)
                self.busy_s, self.since = self.busy_s + time.perf_counter() - self.since, None
        finally:
            self.backlog -= tokens
        self.rooms[body["bootstrap_room"]].set()
        return web.json_response({"meta_info": {"prompt_tokens": tokens}})

    async def status(self, _: web.Request) -> web.Response:
        now, (then, before) = time.perf_counter(), self.seen
        busy_s = self.busy_s + (0.0 if self.since is None else now - self.since)
        self.seen = (now, busy_s)
        share = min(1.0, (busy_s - before) / max(now - then, 1e-6))
        load = Load(backlog_tokens=self.backlog, slo_deviation=0.0, busy_share=share)
        return web.json_response(Status(enabled=True, load=load, pool=self.record).as_dict())

    async def pool(self, request: web.Request) -> web.Response:
        before, made = self.record, read(await request.read(), PoolChange).of(self.record)
        if made is None:
            return web.json_response(msgspec.to_builtins(before), status=409)
        if before.assignment and before.assignment != made.assignment:
            self.moves.append((time.time(), str(made.assignment)))
        self.record = made
        return web.json_response(msgspec.to_builtins(made))


class Emulated:
    """Emulated prefill servers, and a decode server, which answers once a prompt is prefilled."""

    def __init__(self, log: Path, speed: float) -> None:
        self.prefills: dict[str, EmulatedPrefill] = {}
        """Prefill servers by URL."""
        self._rooms, self._log, self._speed = Rooms(asyncio.Event), log, speed
        self._runners: dict[str, web.AppRunner] = {}

    async def prefill(self) -> servers.Server:
        """Start another prefill server."""
        one = EmulatedPrefill(self._rooms, self._speed)
        posts = {"/generate": one.generate, f"/{POOL_ROUTE}": one.pool, "/abort_request": well, "/flush_cache": well}
        server = await self._start(posts, {f"/{STATUS_ROUTE}": one.status})
        self.prefills[server.url] = one
        return server

    async def decode(self) -> servers.Server:
        """Start the decode server."""

        async def generate(request: web.Request) -> web.Response:
            room = (await request.json())["bootstrap_room"]
            await self._rooms[room].wait()
            del self._rooms[room]
            return web.json_response({"text": "x", "meta_info": {}})

        return await self._start({"/generate": generate, "/abort_request": well}, {})

    async def _start(self, posts: dict[str, Any], gets: dict[str, Any]) -> servers.Server:
        app, port = web.Application(), servers.free_port()
        app.add_routes([web.post(path, handler) for path, handler in posts.items()])
        app.add_routes([web.get(path, handler) for path, handler in ({"/health": well} | gets).items()])
        runner = web.AppRunner(app, shutdown_timeout=0.5)
        await runner.setup()
        await web.TCPSite(runner, servers.HOST, port).start()
        server = servers.Server("emulated", (), port, self._log, bootstrap_port=8998)
        self._runners[server.url] = runner
        return server

    async def stop(self, url: str) -> None:
        """Stop a server with all its requests in flight."""
        await self._runners.pop(url).cleanup()

    async def close(self) -> None:
        """Stop all servers."""
        for url in list(self._runners):
            await self.stop(url)


async def well(_: web.Request) -> web.Response:
    """Answer 200 with an empty object."""
    return web.json_response({})
