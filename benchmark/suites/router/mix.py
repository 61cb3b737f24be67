"""Pools that follow a changing mix, on emulated prefill instances.

Each processes one request at a time at a fixed speed, and reports the status of a LAPS server.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import uvloop
from aiohttp import web
from laps_core.protocol import POOL_ROUTE, STATUS_ROUTE, Load, PoolChange, PoolRecord, Status, read
from laps_plan.traffic.job import Job
from laps_plan.traffic.lengths import fixed, mix
from laps_plan.traffic.streams import poisson

from benchmark.load import client
from benchmark.load.connection import Target
from benchmark.load.prompts import Prompts
from benchmark.results import bars
from benchmark.results.piece import Figure, Piece, Table
from benchmark.rig import model, servers
from benchmark.rig.fleet import get_json
from benchmark.suites.router import FLAGS, LAPS, MODULES

SPEED = 12_000
"""Prefill speed of one emulated server (tokens/s)."""
SHORT_TOKENS, LONG_TOKENS = 240, 720
LOAD = 0.6
"""Load of every phase, as a share of all servers' speed."""
SHARES = (0.9, 0.1, 0.9)
"""Share of short requests, by phase."""
PATIENCE_S = 60.0

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

    def __init__(self, log: Path, speed: float = SPEED) -> None:
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


def phase(n: int, share: float, seconds: float, rng: random.Random, speed: float = SPEED) -> list[Job]:
    """Return Poisson arrivals of a phase."""
    rate = LOAD * n * speed / (share * SHORT_TOKENS + (1 - share) * LONG_TOKENS)
    draw = mix(fixed(SHORT_TOKENS), fixed(LONG_TOKENS), 1.0 - share)
    return [Job(at_s, draw(rng)) for at_s in poisson(rate, seconds, rng)]


def speed_of(n: int) -> float:
    """Return the prefill speed of each of ``n`` servers (tokens/s), reduced for large fleets, since this machine limits
    the request rate."""
    return SPEED * min(1.0, 8 / n)


def flags(n: int, period_s: float) -> tuple[str, ...]:
    """Return the flags of a router whose fleet is always divided, so that only the moves between pools are measured."""
    config = {"initial_short": n // 2}
    return (
        *FLAGS[LAPS], "--laps-rebalance-interval-s", str(period_s), "--laps-alloc-config", json.dumps(config),
        "--health-check-interval-secs", "5",
    )  # fmt: skip


async def follow(n: int, period_s: float, phase_s: float, out: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Run pools under a mix that changes twice. The first phase starts from an even split and is warm-up."""
    rng = random.Random(n)
    prompts = Prompts(model.VOCABULARY, n, LONG_TOKENS, reuse=False, prefill_only=False)
    log = out / "logs" / f"router-mix-{n}.log"
    emulated = Emulated(log, speed_of(n))
    prefills, decode = [await emulated.prefill() for _ in range(n)], await emulated.decode()
    router = servers.minilb(prefills, [decode], log, *flags(n, period_s), module=MODULES[LAPS])
    target, loads, changes = Target(servers.HOST, router.port), [], []
    try:
        await asyncio.to_thread(lambda: router.start().ready())
        for i, share in enumerate(SHARES):
            say(f"{n} instances, {share:.0%} short")
            jobs, begin = phase(n, share, phase_s, rng, speed_of(n)), time.time()
            loads.append(asyncio.create_task(client.replay(target, jobs, prompts.bodies(jobs, i), PATIENCE_S)))
            await asyncio.sleep(phase_s)
            status = await asyncio.to_thread(get_json, target, "/laps_status")
            if status is None:
                raise ConnectionError("the router does not answer")
            moves = sorted((m for m in status["migrations"] if m["at"] >= begin), key=lambda m: m["at"])
            changes.append(
                {
                    "short_share": share,
                    "split": [len(status["pools"]["short"]), len(status["pools"]["long"])],
                    "moves": [[round((m["at"] - begin) / period_s, 2), m["to"]] for m in moves],
                    "ttft_p90_ms": {c: status["ttft_ms"][c]["p90"] for c in ("short", "long")},
                    "failed": status["counts"]["failed"],
                }
            )
        await asyncio.gather(*loads)
    finally:
        await asyncio.to_thread(router.stop)
        await emulated.close()
    return {"prefill": n, "period_s": period_s, "phase_s": phase_s, "changes": changes}


def run(out: Path, prefills: Sequence[int], period_s: float, phase_s: float, say: Callable[[str], None]) -> Piece:
    """Run each number of instances in turn."""
    return piece([uvloop.run(follow(n, period_s, phase_s, out, say)) for n in prefills])


def piece(result: Sequence[dict[str, Any]]) -> Piece:
    """Return the piece for the report."""
    rows = [
        (
            str(run["prefill"]), f"{change['short_share']:.0%}", " + ".join(map(str, change["split"])),
            ", ".join(f"{at:.1f} s to {to}" for at, to in change["moves"]) or "none",
            *("-" if v is None else f"{v:.0f}" for v in change["ttft_p90_ms"].values()), str(change["failed"]),
        )
        for run in result
        for change in run["changes"]
    ]  # fmt: skip
    figures = []
    for run in result:
        # Moves before the first change are the controller's start. Moves are given in control periods.
        changes, never = run["changes"][1:], run["phase_s"] / run["period_s"]
        last = max(c["moves"][-1][0] if c["moves"] else never for c in changes)
        # Needed moves: from the split before the change to the one after it.
        splits = [c["split"][0] for c in run["changes"]]
        extra = max(len(c["moves"]) - abs(now - was) for c, (was, now) in zip(changes, pairwise(splits), strict=True))
        of = f"after a change, {run['prefill']} instances"
        figures += [
            Figure.of(f"control periods to the last move {of}", last, bars.LAST_MOVE),
            Figure.of(f"moves more than needed {of}", extra, bars.EXTRA_MOVES),
        ]
    heads = ("instances", "short share", "short + long", "moves", "short P90 ms", "long P90 ms", "failed")
    return Piece(
        name="router-mix",
        title="How the pools follow a mix that changes",
        text="The share of short requests changes from phase to phase; emulated prefill instances behind the router. "
        f"A control period is {result[0]['period_s']:g} s.",
        seed=0,
        tables=[Table("Pools after each change", heads, rows, "Moves: control periods after the change.")],
        figures=figures,
        data={"result": list(result)},
    )
