"""Fake prefill and decode servers with real HTTP on loopback, whose behaviour a test controls. No model."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec
import uvicorn
from aiohttp import web
from laps_core.pools.config import AllocConfig
from laps_core.pools.pressure import Pool
from laps_core.protocol import PoolChange, PoolRecord, read
from laps_core.receipts.receipt import RECEIPT_HEADER
from sglang_router import mini_lb
from sglang_router.router_args import RouterArgs
from sglang_router_laps.balancer import LapsBalancer
from sglang_router_laps.router import Router

from .fake_replies import Body, answer, prompt_tokens, rooms_of

ROUTES = ("generate", "v1/completions", "v1/chat/completions")
SHORT, LONG = "a" * 40, "b" * 8000
"""Short and long prompt."""
JSON_TYPE = {"content-type": "application/json"}
"""Headers for a body that a test serializes itself."""
PROBES = {"health_check_interval_secs": 0.3, "health_check_timeout_secs": 0.3}
NO_PROBES = {"disable_health_check": True}
"""Router arguments: without health checks; ``PROBES`` has frequent health checks."""


async def events_of(response: aiohttp.ClientResponse) -> list[str]:
    """Return the data of all events of a stream."""
    return [e[6:] for e in (await response.text()).split("\n\n") if e.startswith("data: ")]


def entry(status: Body, server: FakeServer | str) -> Body:
    """Return the entry of a server in the router's status."""
    url = server if isinstance(server, str) else server.url
    return next(i for i in (*status["prefill"], *status["decode"]) if i["url"] == url)


@dataclass
class World:
    """State shared by prefill and decode servers: the bootstrap rooms that have been prefilled."""

    ready: dict[int, asyncio.Event] = field(default_factory=dict)

    def event(self, room: int) -> asyncio.Event:
        return self.ready.setdefault(room, asyncio.Event())


class FakeServer:
    """Base of fake servers: a port, the received requests, and the aborted ids."""

    role = ""

    def __init__(self, world: World) -> None:
        self.world = world
        self.bodies: list[Body] = []
        self.headers: list[Any] = []
        self.aborted: list[str] = []
        self.cancelled = 0
        self.flushed, self.flush_status = 0, 200
        self.running = 0
        self.host, self.port = "127.0.0.1", 0
        self.healthy = True
        self.connections: set[Any] = set()
        self.peers: set[Any] = set()
        """Peer addresses of all connections so far."""
        self.probed = 0
        self._runner: web.AppRunner | None = None
        self._kept: socket.socket | None = None
        """Socket that keeps the port after a stop, so that no server of another test can listen there."""

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    async def start(self, port: int = 0) -> None:
        app = web.Application(client_max_size=1 << 30)
        for route in ROUTES:
            app.router.add_post(f"/{route}", self._handle)
        app.router.add_get("/health", self._health)
        app.router.add_post("/abort_request", self._abort)
        app.router.add_post("/flush_cache", self._flush)
        self.add_routes(app)
        self.give_up_port()
        # Not 0: aiohttp would wait without limit for a health check that is in progress.
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, self.host, port).start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Stop as a killed process does: the port closes and every open connection breaks."""
        if self._runner:
            for transport in list(self.connections):
                transport.abort()
            await self._runner.cleanup()
            self._runner = None
            self._kept = socket.socket()
            self._kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                self._kept.bind((self.host, self.port))

    def give_up_port(self) -> None:
        """Release the port."""
        if self._kept:
            self._kept.close()
            self._kept = None

    def add_routes(self, app: web.Application) -> None:
        """Add further routes (in subclasses)."""

    async def serve(self, request: web.Request, body: Body) -> web.StreamResponse:
        raise NotImplementedError

    async def _health(self, _: web.Request) -> web.Response:
        self.probed += 1
        return web.Response(status=200 if self.healthy else 503)

    async def _flush(self, _: web.Request) -> web.Response:
        self.flushed += 1
        return web.Response(status=self.flush_status, text="Cache flushed.")

    async def _abort(self, request: web.Request) -> web.Response:
        self.aborted.append((await request.json())["rid"])
        return web.Response()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        self.bodies.append(body)
        self.headers.append(request.headers)
        self.connections.add(request.transport)
        if request.transport:  # None if the client has disconnected
            self.peers.add(request.transport.get_extra_info("peername"))
        self.running += 1
        try:
            return await self.serve(request, body)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1
            self.connections.discard(request.transport)


class FakePrefill(FakeServer):
    """Prefill server that runs one request at a time at ``tokens_per_s``; with ``laps`` it serves /laps_status."""

    role = "prefill"

    def __init__(self, world: World, tokens_per_s: float = 1e9, laps: bool = True) -> None:
        super().__init__(world)
        self.tokens_per_s = tokens_per_s
        self.laps = laps
        self.gate = asyncio.Event()
        self.gate.set()
        self.status, self.refused = 200, 0
        self.load: Body | None = None
        self.model: Body | None = None
        """Coefficients of the latency model in /laps_status."""
        self.backlog = 0
        self.receipt: Body | None = None
        """Receipt (without id) returned to each request that asks for a receipt; None: no receipts."""
        self.pool = PoolRecord()
        self._device = asyncio.Lock()

    async def start(self, port: int = 0) -> None:
        self.pool = PoolRecord()
        await super().start(port)

    def add_routes(self, app: web.Application) -> None:
        app.router.add_get("/laps_status", self._laps_status)
        app.router.add_post("/laps_pool", self._laps_pool)
        app.on_response_prepare.append(self._with_receipt)

    async def _with_receipt(self, request: web.Request, response: web.StreamResponse) -> None:
        if self.receipt is not None and request.headers.get(RECEIPT_HEADER) == "1":
            rid = json.loads(await request.read())["rid"]
            response.headers[RECEIPT_HEADER] = json.dumps({"rid": rid, **self.receipt})

    async def _laps_status(self, _: web.Request) -> web.Response:
        if not self.laps:
            raise web.HTTPNotFound
        load = self.load or {
            "backlog_tokens": self.backlog,
            "slo_deviation": 0.0,
            "busy_share": float(self.backlog > 0),
        }
        pool = msgspec.to_builtins(self.pool)
        return web.json_response({"enabled": True, "version": "0", "load": load, "pool": pool, "model": self.model})

    async def _laps_pool(self, request: web.Request) -> web.Response:
        if not self.laps:
            raise web.HTTPNotFound
        made = read(await request.read(), PoolChange).of(self.pool)
        self.pool = made or self.pool
        return web.json_response(msgspec.to_builtins(self.pool), status=200 if made else 409)

    async def serve(self, request: web.Request, body: Body) -> web.StreamResponse:
        tokens = prompt_tokens(body)
        self.backlog += tokens
        try:
            async with self._device:
                await self.gate.wait()
                await asyncio.sleep(tokens / self.tokens_per_s)
        finally:
            self.backlog -= tokens
        if self.status != 200:
            self.refused += 1
            return web.json_response({"error": {"message": "no", "code": self.status}}, status=self.status)
        for room in rooms_of(body):
            self.world.event(room).set()
        meta = {"prompt_tokens": tokens, "input_token_logprobs": [[-1.0, 5]]}
        reply = {"text": "x", "meta_info": meta, "usage": {"prompt_tokens": tokens}}
        return await answer(request, body, [reply])


class FakeDecode(FakeServer):
    """Decode server that waits for the rooms' prefill, then sends ``chunks`` events, ``pause_s`` seconds apart."""

    role = "decode"

    def __init__(self, world: World, chunks: int = 3, pause_s: float = 0.0) -> None:
        super().__init__(world)
        self.chunks = chunks
        self.pause_s = pause_s
        self.break_after: int | None = None
        self.status = 200

    async def serve(self, request: web.Request, body: Body) -> web.StreamResponse:
        if self.status != 200:
            return web.json_response({"error": {"message": "no", "code": self.status}}, status=self.status)
        rooms = rooms_of(body)
        await asyncio.gather(*(self.world.event(r).wait() for r in rooms))
        for room in rooms:
            self.world.ready.pop(room, None)
        meta = {"prompt_tokens": prompt_tokens(body), "input_token_logprobs": [[-2.0, 6]], "id": body.get("rid")}
        pieces = [{"text": f"t{i}", "meta_info": meta} for i in range(self.chunks)]
        return await answer(request, body, pieces, self.pause_s, self.break_after)


@dataclass
class Stack:
    """A router in front of fake servers, and a client."""

    prefills: list[FakePrefill]
    decodes: list[FakeDecode]
    lb: Router
    balancer: LapsBalancer
    url: str
    client: aiohttp.ClientSession

    async def status(self) -> Body:
        async with self.client.get(f"{self.url}/laps_status?history=1") as r:
            return await r.json()

    async def post(self, route: str = "generate", **body: Any) -> tuple[int, Any]:
        async with self.client.post(f"{self.url}/{route}", json=body) as r:
            return r.status, await r.json(content_type=None)

    def pool(self, name: Pool) -> list[FakePrefill]:
        urls = {i.url for i in self.lb.pools.members(name)}
        return [p for p in self.prefills if p.url in urls]

    async def until(self, true: Callable[[], bool], timeout: float = 120.0) -> None:
        async with asyncio.timeout(timeout):
            while not true():
                await asyncio.sleep(0.005)

    async def status_when(self, true: Callable[[Body], Any], timeout: float = 120.0) -> Body:
        """Return the first status for which ``true`` holds: one asked for after a wait may hold no more."""
        async with asyncio.timeout(timeout):
            while not true(found := await self.status()):
                await asyncio.sleep(0.01)
        return found

    async def load(self, ended: asyncio.Event, clients: int = 4) -> Counter[int]:
        """Send short and long requests from ``clients`` clients until ``ended``; return answers by status."""
        found: Counter[int] = Counter()

        async def ask() -> None:
            while not ended.is_set():
                # Vary the long prompt: a cached prefix would make it short.
                for text in (SHORT, f"{found.total()} {LONG}"):
                    status, _ = await self.post(text=text)
                    found[status] += 1

        await asyncio.gather(*(ask() for _ in range(clients)))
        return found

    async def at_rest(self) -> None:
        """Wait until nothing is in flight, then require that the counters of all servers are zero."""
        await self.until(lambda: self.lb.queue.in_flight == 0)
        for i in self.lb.instances:
            assert (i.outstanding, i.outstanding_tokens) == (0, 0), i.url


@contextlib.asynccontextmanager
async def serving(config: uvicorn.Config) -> AsyncIterator[int]:
    """Serve in this event loop and yield the port."""
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        await task


@contextlib.asynccontextmanager
async def stack(
    prefills: int = 2,
    decodes: int = 1,
    config: Body | None = None,
    args: Body | None = None,
    make_prefill: Callable[[World], FakePrefill] = FakePrefill,
    make_decode: Callable[[World], FakeDecode] = FakeDecode,
    more_decodes: Sequence[str] = (),
) -> AsyncIterator[Stack]:
    """Run fake servers and a router in this event loop. ``more_decodes``: URLs of decode servers that run elsewhere."""
    world = World()
    p = [make_prefill(world) for _ in range(prefills)]
    d = [make_decode(world) for _ in range(decodes)]
    for server in (*p, *d):
        await server.start()
    try:
        async with router_before(p, d, config, args, more_decodes) as made:
            yield made
    finally:
        for server in (*p, *d):
            await server.stop()
            server.give_up_port()


@contextlib.asynccontextmanager
async def router_before(
    p: list[FakePrefill],
    d: list[FakeDecode],
    config: Body | None = None,
    args: Body | None = None,
    more_decodes: Sequence[str] = (),
) -> AsyncIterator[Stack]:
    """Run one more router in front of running servers."""
    servers = {
        "prefill_urls": [(s.url, 8998) for s in p],
        "decode_urls": [*(s.url for s in d), *more_decodes],
    }
    router_args = RouterArgs(mini_lb=True, pd_disaggregation=True, **{**servers, **(args or {})})
    # Divide the servers into two pools from the start, so that a test knows the destination of a request.
    named = len(router_args.prefill_urls)
    split = {"initial_short": named // 2} if named > 1 else {}
    balancer = LapsBalancer(router_args, AllocConfig.parse({}, json.dumps({**split, **(config or {})})))
    mini_lb.lb = balancer
    served = balancer.server_config()
    served.host, served.port, served.timeout_graceful_shutdown = "127.0.0.1", 0, 1
    async with (
        serving(served) as port,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client,
    ):
        yield Stack(p, d, balancer.router, balancer, f"http://127.0.0.1:{port}", client)
