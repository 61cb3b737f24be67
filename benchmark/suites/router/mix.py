"""How pools follow a mix that changes, on emulated prefill instances.

Each does one request at a time at a fixed speed, and gives the status that a LAPS server gives.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import uvloop
from aiohttp import web
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
"""Share of all servers' speed that the load asks for, in every phase."""
SHARES = (0.9, 0.1, 0.9)
"""Short requests among all, phase by phase."""
PATIENCE_S = 60.0

Rooms = defaultdict[int, asyncio.Event]


class EmulatedPrefill:
    """A server whose device does one prompt at a time."""

    def __init__(self, rooms: Rooms) -> None:
        self.rooms = rooms
        self.backlog = 0
        self.busy_s = 0.0
        self.seen = (time.perf_counter(), 0.0)
        self.device = asyncio.Lock()

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        tokens = len(body["input_ids"])
        self.backlog += tokens
        try:
            async with self.device:
                await asyncio.sleep(tokens / SPEED)
                self.busy_s += tokens / SPEED
        finally:
            self.backlog -= tokens
        self.rooms[body["bootstrap_room"]].set()
        return web.json_response({"meta_info": {"prompt_tokens": tokens}})

    async def status(self, _: web.Request) -> web.Response:
        now, (then, before) = time.perf_counter(), self.seen
        self.seen = (now, self.busy_s)
        share = min(1.0, (self.busy_s - before) / max(now - then, 1e-6))
        return web.json_response(
            {"enabled": True, "load": {"backlog_tokens": self.backlog, "slo_deviation": 0.0, "busy_share": share}}
        )


async def start(n: int, log: Path) -> tuple[list[web.AppRunner], list[servers.Server]]:
    """``n`` prefill servers and a decode server, which answers once the prompt is prefilled."""
    runners, started, rooms = [], [], Rooms(asyncio.Event)

    async def decode(request: web.Request) -> web.Response:
        room = (await request.json())["bootstrap_room"]
        await rooms[room].wait()
        del rooms[room]
        return web.json_response({"text": "x", "meta_info": {}})

    for i in range(n + 1):
        app, one, port = web.Application(), EmulatedPrefill(rooms), servers.free_port()
        app.router.add_post("/generate", one.generate if i < n else decode)
        if i < n:
            app.router.add_get("/laps_status", one.status)
        runners.append(web.AppRunner(app))
        await runners[-1].setup()
        await web.TCPSite(runners[-1], servers.HOST, port).start()
        started.append(servers.Server("emulated", (), port, log, bootstrap_port=8998))
    return runners, started


def phase(n: int, share: float, seconds: float, rng: random.Random) -> list[Job]:
    """Poisson arrivals of a phase."""
    rate = LOAD * n * SPEED / (share * SHORT_TOKENS + (1 - share) * LONG_TOKENS)
    draw = mix(fixed(SHORT_TOKENS), fixed(LONG_TOKENS), 1.0 - share)
    return [Job(at_s, draw(rng)) for at_s in poisson(rate, seconds, rng)]


async def follow(n: int, period_s: float, phase_s: float, out: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Pools under a mix that changes twice. The first phase starts from an even split and is warm-up."""
    rng = random.Random(n)
    prompts = Prompts(model.VOCABULARY, n, LONG_TOKENS, reuse=False, prefill_only=False)
    log = out / "logs" / f"router-mix-{n}.log"
    runners, behind = await start(n, log)
    flags = (*FLAGS[LAPS], "--laps-rebalance-interval-s", str(period_s))
    router = servers.minilb(behind[:n], behind[n:], log, *flags, module=MODULES[LAPS])
    target, loads, changes = Target(servers.HOST, router.port), [], []
    try:
        await asyncio.to_thread(lambda: router.start().ready())
        for i, share in enumerate(SHARES):
            say(f"{n} instances, {share:.0%} short")
            jobs, begin = phase(n, share, phase_s, rng), time.time()
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
        for runner in runners:
            await runner.cleanup()
    return {"prefill": n, "period_s": period_s, "phase_s": phase_s, "changes": changes}


def run(out: Path, prefills: Sequence[int], period_s: float, phase_s: float, say: Callable[[str], None]) -> Piece:
    """Each number of instances in turn."""
    return piece([uvloop.run(follow(n, period_s, phase_s, out, say)) for n in prefills])


def piece(result: Sequence[dict[str, Any]]) -> Piece:
    """For the report."""
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
        # What comes before the first change is the controller finding its start. Moves are told in control periods.
        changes, never = run["changes"][1:], run["phase_s"] / run["period_s"]
        first = max(c["moves"][0][0] if c["moves"] else never for c in changes)
        moves = max(len(c["moves"]) for c in changes)
        of = f"after a change, {run['prefill']} instances"
        figures += [
            Figure.of(f"control periods to the first move {of}", first, bars.FIRST_MOVE),
            Figure.of(f"moves {of}", moves, bars.moves(run["prefill"])),
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
