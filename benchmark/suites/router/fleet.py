"""Three routers before eight prefill servers, with a changing mix, a replaced server and a killed router.

The servers are those of ``mix``; the test is that nothing is lost and that the routers agree.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import uvloop
from laps_core.pools.pressure import BEATS
from laps_plan.traffic.job import Job

from benchmark.load import client
from benchmark.load.connection import Target
from benchmark.load.prompts import Prompts
from benchmark.results import bars
from benchmark.results.piece import Figure, Piece, Table
from benchmark.rig import model, servers
from benchmark.suites.router import LAPS, MODULES
from benchmark.suites.router.mix import LONG_TOKENS, PATIENCE_S, Emulated, flags, phase

ROUTERS, PREFILLS = 3, 8
SPEED = 3000.0
"""Prefill speed of one server (tokens/s), such that this machine sustains the load with three routers."""
SHARES = (0.9, 0.1)
"""Share of short requests, alternating."""
REPLACED, KILLED = 4.5, 6.5
"""Times at which a server is replaced and a router killed (phases after the start)."""
BEAT_S = 0.05
"""Polling period of the routers (seconds)."""

KEY = "fleet"
BEARER = {"authorization": f"Bearer {KEY}"}
"""A router without a key accepts no changes of its servers."""
Pools = frozenset[str]
"""URLs of the short pool."""


@dataclass
class Watch:
    """The short pool as the routers report it, and the times for which they disagreed."""

    splits: list[tuple[float, int]] = field(default_factory=list)
    """Times at which the first router's short pool changed, and its size."""
    apart_s: list[float] = field(default_factory=list)
    _since: float | None = None

    def saw(self, at: float, said: Sequence[Pools]) -> None:
        """Take in the simultaneous answers of all routers."""
        if not self.splits or self.splits[-1][1] != len(said[0]):
            self.splits.append((at, len(said[0])))
        if len(set(said)) > 1:
            self._since = at if self._since is None else self._since
        elif self._since is not None:
            self.apart_s.append(at - self._since)
            self._since = None


@dataclass
class Scene:
    """Running processes and past events."""

    routers: list[servers.Server]
    emulated: Emulated
    watch: Watch = field(default_factory=Watch)
    events: list[tuple[float, str]] = field(default_factory=list)

    async def look(self) -> None:
        """Poll the live routers. Ends when cancelled."""
        timeout = aiohttp.ClientTimeout(total=5)
        async with aiohttp.ClientSession(timeout=timeout, headers=BEARER) as session:
            while True:
                alive = [r for r in self.routers if r.alive()]
                try:
                    said = await asyncio.gather(*(_pools(session, r) for r in alive))
                    self.watch.saw(time.time(), said)
                except (aiohttp.ClientError, OSError):
                    # The router has just been killed.
                    pass
                await asyncio.sleep(BEAT_S)

    async def replace(self, server: servers.Server) -> None:
        """Remove a server, and give the routers another one."""
        new = await self.emulated.prefill()
        async with aiohttp.ClientSession(headers=BEARER) as session:
            for router in self.routers:
                body = {"url": new.url, "worker_type": "prefill", "bootstrap_port": new.bootstrap_port}
                async with session.post(f"{router.url}/workers", json=body) as reply:
                    reply.raise_for_status()
                async with session.get(f"{router.url}/workers") as reply:
                    known = {w["url"]: w["id"] for w in (await reply.json())["workers"]}
                async with session.delete(f"{router.url}/workers/{known[server.url]}") as reply:
                    reply.raise_for_status()
        self.events.append((time.time(), "server replaced"))
        # Like a pod's grace period.
        await asyncio.sleep(5.0)
        await self.emulated.stop(server.url)

    def kill(self, router: servers.Server) -> None:
        """Kill a router, like the loss of its machine."""
        router.kill()
        self.events.append((time.time(), "router killed"))


async def _pools(session: aiohttp.ClientSession, router: servers.Server) -> Pools:
    async with session.get(f"{router.url}/laps_status") as reply:
        return frozenset((await reply.json())["pools"]["short"])


def shared_out(jobs: Iterable[Job], alive: Sequence[int]) -> dict[int, list[Job]]:
    """Distribute jobs to the live routers in turn."""
    found: dict[int, list[Job]] = {i: [] for i in alive}
    for n, job in enumerate(jobs):
        found[alive[n % len(alive)]].append(job)
    return found


async def play(phases: int, phase_s: float, period_s: float, out: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Run all phases and return the raw figures."""
    rng, log = random.Random(1), out / "logs"
    prompts = Prompts(model.VOCABULARY, 1, LONG_TOKENS, reuse=False, prefill_only=False)
    emulated = Emulated(log / "emulated.log", SPEED)
    prefills, decode = [await emulated.prefill() for _ in range(PREFILLS)], await emulated.decode()
    more = (*flags(PREFILLS, period_s), "--api-key", KEY)
    routers = [
        servers.minilb(prefills, [decode], log / f"router{i}.log", *more, module=MODULES[LAPS], name=f"router {i}")
        for i in range(ROUTERS)
    ]
    scene = Scene(routers, emulated)
    jobs = [
        Job(p * phase_s + job.at_s, job.new)
        for p in range(phases)
        for job in phase(PREFILLS, SHARES[p % len(SHARES)], phase_s, rng, SPEED)
    ]
    killed_s, last = KILLED * phase_s, ROUTERS - 1
    shares = shared_out((j for j in jobs if j.at_s < killed_s), range(ROUTERS))
    for i, rest in shared_out((j for j in jobs if j.at_s >= killed_s), range(last)).items():
        shares[i] += rest
    try:
        await asyncio.to_thread(lambda: [r.start() for r in routers] and [r.ready() for r in routers])
        looking = asyncio.create_task(scene.look())
        begin = time.time()
        loads = [
            asyncio.create_task(
                client.replay(Target(servers.HOST, routers[i].port), mine, prompts.bodies(mine, i), PATIENCE_S)
            )
            for i, mine in shares.items()
        ]
        say(f"{phases} phases of {phase_s:g} s, {len(jobs)} requests")
        await asyncio.sleep(REPLACED * phase_s - (time.time() - begin))
        say("a server is replaced")
        await scene.replace(prefills[0])
        await asyncio.sleep(killed_s - (time.time() - begin))
        say("a router is killed")
        await asyncio.to_thread(scene.kill, routers[last])
        seen = await asyncio.gather(*loads)
        looking.cancel()
    finally:
        for router in routers:
            await asyncio.to_thread(router.stop)
        await emulated.close()
    # Requests in flight at the killed router were lost with it.
    excused = [a for a in seen[last] if a.ttft_s is None and a.job.at_s > killed_s - PATIENCE_S]
    lost = sum(a.ttft_s is None for answers in seen for a in answers) - len(excused)
    moves = sorted((at - begin, to) for one in emulated.prefills.values() for at, to in one.moves)
    return {
        "phases": phases, "phase_s": phase_s, "period_s": period_s, "requests": len(jobs), "lost": lost,
        "with the killed router": len(excused), "moves": moves, "apart_s": scene.watch.apart_s,
        "splits": [(at - begin, n) for at, n in scene.watch.splits],
        "events": [(at - begin, what) for at, what in scene.events],
    }  # fmt: skip


def run(out: Path, phases: int, phase_s: float, period_s: float, say: Callable[[str], None]) -> Piece:
    """Run the benchmark. Raises ServerError or ConnectionError."""
    return piece(uvloop.run(play(phases, phase_s, period_s, out, say)))


def piece(found: dict[str, Any]) -> Piece:
    """Return the piece for the report."""
    phase_s, period_s, beat_s = found["phase_s"], found["period_s"], found["period_s"] / BEATS
    rows, extra, last = [], 0, 0.0
    before = None
    for p in range(found["phases"]):
        begin, end = p * phase_s, (p + 1) * phase_s
        moves = [(at - begin, to) for at, to in found["moves"] if begin <= at < end]
        split = [n for at, n in found["splits"] if at < end][-1]
        needed = 0 if before is None else abs(split - before)
        happened = [what for at, what in found["events"] if begin <= at < end]
        if before is not None:
            # A replacement has to be put into a pool again.
            extra = max(extra, len(moves) - needed - len(happened))
            last = max([last, *(at / period_s for at, _ in moves)]) if not happened else last
        told = ", ".join(f"{at / period_s:.1f} to {to}" for at, to in moves) or "none"
        rows.append((str(p + 1), f"{SHARES[p % len(SHARES)]:.0%}", f"{split} + {PREFILLS - split}", told,
                     ", ".join(happened)))  # fmt: skip
        before = split
    apart = max(found["apart_s"], default=0.0) / beat_s
    return Piece(
        name="router-fleet",
        title="Three routers, eight prefill servers",
        text=f"The share of short requests changes every {phase_s:g} s; {found['requests']} requests, in turn to "
        f"{ROUTERS} LAPS routers in front of {PREFILLS} emulated prefill instances that keep their pool. One server is "
        f"replaced, one router killed. A control period is {period_s:g} s, a signal period a fifth of it.",
        seed=1,
        tables=[
            Table("Phases", ("phase", "short share", "short + long", "moves", "besides"), rows,
                  "Moves: control periods after the change.")
        ],
        figures=[
            Figure.of("requests lost, but those on the killed router's connections", found["lost"], bars.NONE),
            Figure("requests lost with the killed router", found["with the killed router"]),
            Figure.of("signal periods until the routers agree, longest", apart, bars.AGREED),
            Figure.of("moves more than needed after a change", extra, bars.EXTRA_MOVES),
            Figure.of("control periods to the last move after a change", last, bars.LAST_MOVE),
        ],
        data=found,
    )  # fmt: skip
