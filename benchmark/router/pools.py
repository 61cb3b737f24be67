"""Pools that follow a changing mix: one router before few and many instances, and three routers before eight, of which
one is replaced while a router is killed. The test there is that nothing is lost and that the routers agree."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import uvloop
from laps_core.pools.pressure import BEATS
from laps_plan.traffic.job import LONG, SHORT, Job
from laps_plan.traffic.lengths import fixed, mix
from laps_plan.traffic.streams import poisson

from benchmark.load import client
from benchmark.load.client import Answer
from benchmark.load.connection import Target
from benchmark.load.prompts import Prompts
from benchmark.results import Figure, Piece, Table, bars, quantiles
from benchmark.rig import model, servers
from benchmark.router import FLAGS, LAPS, MODULES
from benchmark.router.emulated import Emulated

SHORT_TOKENS, LONG_TOKENS = 240, 720
LOAD = 0.6
"""Load of every phase, as a share of all servers' speed."""
SPEED, FLEET_SPEED = 12_000.0, 3000.0
"""Prefill speed of one server (tokens/s); the second such that this machine sustains the load with three routers."""
SHARES, FLEET_SHARES = (0.9, 0.1, 0.9), (0.9, 0.1)
"""Share of short requests, by phase; the second alternate."""
ROUTERS, PREFILLS = 3, 8
REPLACED, KILLED = 4.5, 6.5
"""Times at which a server is replaced and a router killed (phases after the start)."""
BEAT_S, LONE_BEAT_S = 0.05, 0.5
"""Polling period of several routers, which are to agree, and of one alone (seconds)."""
GRACE_S = 5.0
"""Time for which a server that was taken from the routers goes on, like a pod's grace period (seconds)."""
PATIENCE_S = 60.0
KEY = "fleet"
BEARER = {"authorization": f"Bearer {KEY}"}
"""A router without a key accepts no changes of its servers."""
MOVES = "Moves: control periods after the change."
Found = dict[str, Any]
"""Figures of a run: of all of it, and of each of its "phases"."""


@dataclass(frozen=True)
class Setting:
    """Servers, load and its changes."""

    routers: int
    prefills: int
    shares: Sequence[float]
    """Share of short requests, by phase."""
    phase_s: float
    period_s: float
    """Control period."""
    speed: float
    """Prefill speed of one server (tokens/s)."""
    disturbed: bool = False
    """True if a server is replaced and a router killed."""

    def jobs(self, rng: random.Random) -> list[Job]:
        """Return Poisson arrivals of all phases."""
        found = []
        for i, share in enumerate(self.shares):
            rate = LOAD * self.prefills * self.speed / (share * SHORT_TOKENS + (1 - share) * LONG_TOKENS)
            draw = mix(fixed(SHORT_TOKENS), fixed(LONG_TOKENS), 1.0 - share)
            found += [Job(i * self.phase_s + at_s, draw(rng)) for at_s in poisson(rate, self.phase_s, rng)]
        return found

    @property
    def killed_s(self) -> float:
        """Return the time of the last router's end (seconds after the start)."""
        return KILLED * self.phase_s if self.disturbed else float("inf")

    def flags(self) -> tuple[str, ...]:
        """Return the flags of a router whose fleet is always divided, so that only the moves between pools are
        measured."""
        config = {"initial_short": self.prefills // 2}
        return (
            *FLAGS[LAPS], "--laps-rebalance-interval-s", str(self.period_s), "--laps-alloc-config", json.dumps(config),
            "--health-check-interval-secs", "5", "--api-key", KEY,
        )  # fmt: skip


@dataclass
class Watch:
    """The short pool as the routers report it, and the times for which they disagreed."""

    splits: list[tuple[float, int]] = field(default_factory=list)
    """Times at which the first router's short pool changed, and its size."""
    apart_s: list[float] = field(default_factory=list)
    _since: float | None = None

    def saw(self, at: float, said: Sequence[frozenset[str]]) -> None:
        """Take in the simultaneous answers of all routers: URLs of their short pools."""
        if not self.splits or self.splits[-1][1] != len(said[0]):
            self.splits.append((at, len(said[0])))
        if len(set(said)) > 1:
            self._since = at if self._since is None else self._since
        elif self._since is not None:
            self.apart_s.append(at - self._since)
            self._since = None

    async def look(self, routers: Sequence[servers.Server], beat_s: float) -> None:
        """Poll the live routers. Ends when cancelled."""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5), headers=BEARER) as session:
            while True:
                try:
                    said = await asyncio.gather(*(_short_pool(session, r) for r in routers if r.alive()))
                    self.saw(time.time(), said)
                except (aiohttp.ClientError, OSError):
                    # The router has just been killed.
                    pass
                await asyncio.sleep(beat_s)


async def _short_pool(session: aiohttp.ClientSession, router: servers.Server) -> frozenset[str]:
    async with session.get(f"{router.url}/laps_status") as reply:
        return frozenset((await reply.json())["pools"]["short"])


async def replace(server: servers.Server, new: servers.Server, routers: Iterable[servers.Server]) -> None:
    """Give the routers a server in place of another."""
    async with aiohttp.ClientSession(headers=BEARER) as session:
        for router in routers:
            body = {"url": new.url, "worker_type": "prefill", "bootstrap_port": new.bootstrap_port}
            async with session.post(f"{router.url}/workers", json=body) as reply:
                reply.raise_for_status()
            async with session.get(f"{router.url}/workers") as reply:
                known = {w["url"]: w["id"] for w in (await reply.json())["workers"]}
            async with session.delete(f"{router.url}/workers/{known[server.url]}") as reply:
                reply.raise_for_status()


def shared_out(jobs: Iterable[Job], setting: Setting) -> list[list[Job]]:
    """Distribute jobs to the live routers in turn."""
    found: list[list[Job]] = [[] for _ in range(setting.routers)]
    for n, job in enumerate(jobs):
        alive = setting.routers - (job.at_s >= setting.killed_s)
        found[n % alive].append(job)
    return found


async def play(setting: Setting, seed: int, out: Path, say: Callable[[str], None]) -> Found:
    """Run all phases."""
    log, watch = out / "logs", Watch()
    prompts = Prompts(model.VOCABULARY, seed, LONG_TOKENS, prefill_only=False)
    emulated = Emulated(log / "emulated.log", setting.speed)
    prefills, decode = [await emulated.prefill() for _ in range(setting.prefills)], await emulated.decode()
    routers = [
        servers.minilb(prefills, [decode], log / f"router{i}.log", *setting.flags(), module=MODULES[LAPS])
        for i in range(setting.routers)
    ]
    jobs, events = setting.jobs(random.Random(seed)), []
    try:
        await asyncio.to_thread(lambda: [r.start() for r in routers] and [r.ready() for r in routers])
        looking = asyncio.create_task(watch.look(routers, BEAT_S if setting.routers > 1 else LONE_BEAT_S))
        say(
            f"{setting.prefills} instances, {len(setting.shares)} phases of {setting.phase_s:g} s, {len(jobs)} requests"
        )
        begin = time.time()
        loads = [
            asyncio.create_task(
                client.replay(Target(servers.HOST, router.port), mine, prompts.bodies(mine, i), PATIENCE_S)
            )
            for i, (router, mine) in enumerate(zip(routers, shared_out(jobs, setting), strict=True))
        ]
        if setting.disturbed:
            await asyncio.sleep(REPLACED * setting.phase_s - (time.time() - begin))
            await replace(prefills[0], await emulated.prefill(), routers)
            events.append((time.time() - begin, "server replaced"))
            await asyncio.sleep(GRACE_S)
            await emulated.stop(prefills[0].url)
            await asyncio.sleep(setting.killed_s - (time.time() - begin))
            await asyncio.to_thread(routers[-1].kill)
            events.append((time.time() - begin, "router killed"))
        seen = await asyncio.gather(*loads)
        looking.cancel()
    finally:
        for router in routers:
            await asyncio.to_thread(router.stop)
        await emulated.close()
    # Requests in flight at the killed router were lost with it.
    excused = [a for a in seen[-1] if a.ttft_s is None and a.job.at_s > setting.killed_s - PATIENCE_S]
    answers = [a for each in seen for a in each]
    moves = sorted((at - begin, to) for one in emulated.prefills.values() for at, to in one.moves)
    splits = [(at - begin, n) for at, n in watch.splits]
    return {
        "prefill": setting.prefills, "phase_s": setting.phase_s, "period_s": setting.period_s, "requests": len(jobs),
        "lost": sum(a.ttft_s is None for a in answers) - len(excused), "with the killed router": len(excused),
        "apart_s": watch.apart_s, "phases": list(_phases(setting, answers, moves, splits, events)),
    }  # fmt: skip


def _phases(
    setting: Setting, answers: Sequence[Answer], moves: Sequence[tuple[float, str]],
    splits: Sequence[tuple[float, int]], events: Sequence[tuple[float, str]],
) -> Iterator[Found]:  # fmt: skip
    """Yield the figures of each phase; moves in control periods after its begin."""
    for i, share in enumerate(setting.shares):
        begin, end = i * setting.phase_s, (i + 1) * setting.phase_s
        mine = [a for a in answers if begin <= a.job.at_s < end]
        short = [n for at, n in splits if at < end][-1]
        yield {
            "short_share": share,
            "split": [short, setting.prefills - short],
            "moves": [[round((at - begin) / setting.period_s, 2), to] for at, to in moves if begin <= at < end],
            "besides": [what for at, what in events if begin <= at < end],
            "ttft_p90_ms": {kind: quantiles(mine, kind)["p90_ms"] for kind in (SHORT, LONG)},
            "failed": sum(a.ttft_s is None for a in mine),
        }


def judged(found: Found, of: str = "") -> list[Figure]:
    """Return what the pools took to follow the changes. The first phase starts from an even split and is warm-up."""
    never = found["phase_s"] / found["period_s"]
    last, extra = 0.0, 0
    for before, now in pairwise(found["phases"]):
        # A server that was replaced has to be put into a pool again.
        needed = abs(now["split"][0] - before["split"][0]) + len(now["besides"])
        extra = max(extra, len(now["moves"]) - needed)
        if not now["besides"]:
            last = max(last, now["moves"][-1][0] if now["moves"] else never)
    return [
        Figure.of(f"control periods to the last move after a change{of}", last, bars.LAST_MOVE),
        Figure.of(f"moves more than needed after a change{of}", extra, bars.EXTRA_MOVES),
    ]


def table(title: str, runs: Sequence[Found]) -> Table:
    """Return a row for each phase of each run."""
    rows = [
        (
            str(run["prefill"]), f"{p['short_share']:.0%}", " + ".join(map(str, p["split"])),
            ", ".join(f"{at:.1f} to {to}" for at, to in p["moves"]) or "none", ", ".join(p["besides"]),
            *(f"{ms:.0f}" for ms in p["ttft_p90_ms"].values()), str(p["failed"]),
        )
        for run in runs
        for p in run["phases"]
    ]  # fmt: skip
    heads = (
        "instances", "short share", "short + long", "moves", "besides", "short P90 ms", "long P90 ms", "failed",
    )  # fmt: skip
    return Table(title, heads, rows, MOVES)


def run(args: argparse.Namespace) -> Piece:
    """Run one router before each number of instances in turn; in large fleets they are slower, since this machine
    limits the request rate."""
    phase_s, runs = args.seconds or 12 * args.period, []
    for n in args.prefill or (4, 8, 64):
        setting = Setting(1, n, SHARES, phase_s, args.period, SPEED * min(1.0, 8 / n))
        runs.append(uvloop.run(play(setting, n, args.out, args.say)))
    text = (
        "The share of short requests changes from phase to phase; emulated prefill instances behind the router. "
        f"A control period is {args.period:g} s."
    )
    figures = [f for found in runs for f in judged(found, f", {found['prefill']} instances")]
    tables, title = [table("Pools after each change", runs)], "How the pools follow a mix that changes"
    return Piece("router-mix", title, text, 0, tables, figures, data={"result": runs})


def run_fleet(args: argparse.Namespace) -> Piece:
    """Run three routers. Raises ServerError or ConnectionError."""
    phase_s, shares = args.seconds or 60.0, [FLEET_SHARES[i % len(FLEET_SHARES)] for i in range(args.phases)]
    setting = Setting(ROUTERS, PREFILLS, shares, phase_s, args.period, FLEET_SPEED, disturbed=True)
    found = uvloop.run(play(setting, 1, args.out, args.say))
    apart = max(found["apart_s"], default=0.0) / (args.period / BEATS)
    text = (
        f"The share of short requests changes every {phase_s:g} s; {found['requests']} requests, in turn to "
        f"{ROUTERS} LAPS routers in front of {PREFILLS} emulated prefill instances that keep their pool. One server is "
        f"replaced, one router killed. A control period is {args.period:g} s, a signal period a fifth of it."
    )
    figures = [
        Figure.of("requests lost, but those on the killed router's connections", found["lost"], bars.NONE),
        Figure("requests lost with the killed router", found["with the killed router"]),
        Figure.of("signal periods until the routers agree, longest", apart, bars.AGREED),
        *judged(found),
    ]
    title = "Three routers, eight prefill servers"
    return Piece("router-fleet", title, text, 1, [table("Phases", [found])], figures, data=found)
