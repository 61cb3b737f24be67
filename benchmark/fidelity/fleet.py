"""Several emulated prefill servers behind a router: SGLang's own with stock fcfs, and the router and scheduler of LAPS.

Real prefill servers whose steps last as long as the profile says, a real decode server, KV over Mooncake, and real
routers, all on this machine. The mix of ``policies``, open at shares of the stock servers' capacity, and in closed
loops; the simulator runs the same. For the paper's claims about several instances.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from laps_plan.profile import Profile
from laps_plan.sim.variants import VARIANTS
from laps_plan.sim.variants import run as simulate
from laps_plan.traffic.job import Job
from laps_plan.traffic.streams import Closed, Trace

from benchmark.fidelity import claims, compare
from benchmark.fidelity.compare import drawn, quantiles
from benchmark.fidelity.policies import capacity, emulator, sizes
from benchmark.load import client
from benchmark.load.connection import Target
from benchmark.load.prompts import Prompts
from benchmark.results import FAILED, Column, Command, Comparison, Parser, Piece, Table, beside
from benchmark.rig.devices import Device
from benchmark.rig.fleet import warm_up
from benchmark.rig.variants import FCFS
from benchmark.rig.variants import LAPS as LAPS_PREFILL
from benchmark.router import LAPS, STOCK, site
from benchmark.serve.compare import closed_loop

GATEWAY = "gateway, power of two"
BASE = "stock"
WAYS = {
    BASE: (FCFS, STOCK, "round-robin"),
    "stock, gateway": (FCFS, GATEWAY, "least-load"),
    "laps servers": (LAPS_PREFILL, STOCK, "round-robin"),
    "laps": (LAPS_PREFILL, LAPS, "pools"),
}
"""Name -> prefill servers, router, the simulator's router. MiniLB picks at random: plain data parallelism."""
ALONE = (BASE, "laps servers")
"""Ways that differ with one server."""
LOADS = (0.5, 0.7, 0.85)
CLIENTS = (8, 32)
"""Clients of the closed loops, for each server."""
BODIES = 3000
"""Distinct requests of a closed loop."""
CYCLES = 200
"""Least number of requests of each client in a simulated closed loop."""
SLO_S = 0.4
"""SLO of the paper (seconds); stretched like the device."""
PATIENCE_S = 120.0
RATES = (Column("requests/s", ("rate",), ".1f"), Column("over the SLO", ("over",), ".1%"))
COLUMNS = (
    *(Column(head, (key,), scale=1e3) for head, key in (("short P90", "short_p90"), ("long P90", "long_p90"))),
    Column("mean", ("mean",), scale=1e3), *reversed(RATES), FAILED,
)  # fmt: skip
NAMES = {"short_p90": "short P90", "long_p90": "long P90", "mean": "mean", "rate": "requests/s"}
Runs = dict[str, Any]
"""Way -> "open" or "closed" -> load or clients -> figure -> value; times in seconds."""


def options(p: Parser) -> None:
    """Add the options of this command."""
    compare.add_load(p, 45.0)
    p.add_argument("--servers", type=int, default=4, help="(4)")
    p.add_argument("--loads", type=float, nargs="+", default=list(LOADS), help="shares of the stock servers' capacity")
    p.add_argument("--clients", type=int, nargs="+", help="clients of the closed loops (8 and 32 for each server)")


def prepare(args: argparse.Namespace) -> None:
    """Fill in what follows from the number of servers and the device."""
    args.ways = tuple(WAYS) if args.servers > 1 else ALONE
    args.clients = args.clients or [n * args.servers for n in CLIENTS]
    args.device, args.slo_s = replace(args.device, chunk=args.chunk), args.device.slow * SLO_S
    args.profile = Profile.load(args.device.laps["profile"])
    args.rate = args.servers * capacity(args.profile, args.chunk, args.seed)


def figures(new: Sequence[int], ttft: Sequence[float], rate: float, slo_s: float, **more: Any) -> dict[str, Any]:
    """Return quantiles, mean TTFT (seconds), requests/s, and the share of TTFTs above the SLO."""
    found = quantiles(new, ttft)
    return {
        "short_p90": found["short P90"], "long_p90": found["long P90"], "rate": rate, "mean": statistics.fmean(ttft),
        "over": sum(t > slo_s for t in ttft) / len(ttft), "failed": 0, **more,
    }  # fmt: skip


def opened(args: argparse.Namespace, load: float) -> list[Job]:
    """Return the jobs of an open load."""
    return drawn(sizes(), load * args.rate, args.seconds, f"{args.seed}/{load}")


def measured(args: argparse.Namespace) -> Runs:
    """Run all loads on servers."""
    device: Device = args.device
    prompts, found = Prompts(device.vocabulary, args.seed, device.longest, prefill_only=False), Runs(emulator={})
    decode = ("--max-total-tokens", "524288", "--max-running-requests", "256")
    for variant in (FCFS, LAPS_PREFILL):
        mine = {name: WAYS[name][1] for name in args.ways if WAYS[name][0] == variant}
        checkpoint, routers = device.checkpoint(), list(mine.values())
        with site(device, checkpoint, variant, args.servers, routers, args.out, args.say, decode=decode) as up:
            for name, router in mine.items():
                target, rng = up.routers[router], random.Random(args.seed)
                warm_up(target, prompts, 8192)
                found[name] = {"open": {}, "closed": {}}
                for load in args.loads:
                    args.say(f"{name}, {load:.0%}")
                    found[name]["open"][f"{load:g}"] = _open(target, prompts, load, args)
                    up.flush()
                for clients in args.clients:
                    args.say(f"{name}, {clients} clients")
                    found[name]["closed"][str(clients)] = _closed(target, prompts, clients, rng, args)
                    up.flush()
            found["emulator"][variant] = [emulator(prefill) for prefill in up.prefills]
    return found


def _open(target: Target, prompts: Prompts, load: float, args: argparse.Namespace) -> dict[str, Any]:
    jobs = opened(args, load)
    answers = asyncio.run(client.replay(target, jobs, prompts.bodies(jobs, args.seed), PATIENCE_S))
    good = [(a, a.ttft_s) for a in answers if a.ttft_s is not None]
    new, ttft = [a.job.new for a, _ in good], [ttft_s for _, ttft_s in good]
    rate = len(good) / max(a.sent_s + ttft_s for a, ttft_s in good)
    return figures(new, ttft, rate, args.slo_s, failed=len(answers) - len(good))


def _closed(
    target: Target, prompts: Prompts, clients: int, rng: random.Random, args: argparse.Namespace
) -> dict[str, Any]:
    draw = sizes()
    new = [draw(rng) for _ in range(BODIES)]
    bodies = prompts.bodies([Job(0.0, n) for n in new], clients)
    loop = closed_loop(target, bodies, clients, args.seconds, args.seconds / 4, new)
    asked, steady = [a.tokens for a in loop.counted], loop.steady.as_dict()
    return figures(asked, loop.ttft_s, loop.rate, args.slo_s, steady=steady)


def simulated(args: argparse.Namespace) -> Runs:
    """Simulate the same loads."""
    found, slo_s = Runs(), args.slo_s
    how: dict[str, Any] = {
        "servers": args.servers, "chunk": args.chunk, "overlap": True,
        "knobs": {k: v for k, v in args.device.laps.items() if k != "profile"},
    }  # fmt: skip
    for name in args.ways:
        variant, _, router = WAYS[name]
        found[name] = {"open": {}, "closed": {}}
        for load in args.loads:
            o = simulate(VARIANTS[variant], Trace(opened(args, load)), args.profile, router=router, **how)
            found[name]["open"][f"{load:g}"] = figures(o.record.new, o.record.ttft, o.rate, slo_s)
        for clients in args.clients:
            # Long enough that a prompt which is parked for long ends in it.
            work = Closed(sizes(), clients, max(round(args.seconds * args.rate), CYCLES * clients), args.seed)
            o = simulate(VARIANTS[variant], work, args.profile, router=router, **how)
            steady = o.steady(clients).require(f"{name}, simulated")
            more = {"fixed": o.batches * o.profile.coefficients.step_s / sum(o.busy_s), "steady": steady.as_dict()}
            told = figures(o.record.new, o.record.ttft, steady.requests_per_s, slo_s, **more)
            found[name]["closed"][str(clients)] = told
    return found


def tell(piece: Piece, both: tuple[Runs, Runs], args: argparse.Namespace) -> None:
    """Add emulated and simulated figures side by side, and LAPS's over stock's."""
    mine, real = args.ways[-1], both[0]
    for load in (f"{load:g}" for load in args.loads):
        seen = [Comparison({name: [runs[name]["open"][load]] for name in args.ways}) for runs in both]
        title = f"At {float(load):.0%}: TTFT in ms, emulated / simulated"
        piece.tables.append(beside(title, "", seen, COLUMNS))
        for key, words in NAMES.items():
            ratio = real[mine]["open"][load][key] / real[BASE]["open"][load][key]
            piece.judge(f"at {float(load):.0%}, {words}, laps / stock", ratio)
    loops = [
        Comparison({n: [{name: runs[name]["closed"][n] for name in args.ways}] for n in map(str, args.clients)})
        for runs in both
    ]
    columns = [replace(c, head=f"{name}, {c.head}", path=(name, *c.path)) for c in RATES for name in args.ways]
    piece.tables.append(beside("Closed loops: emulated / simulated", "clients", loops, columns))
    for n in map(str, args.clients):
        rates = [real[name]["closed"][n]["rate"] for name in (mine, BASE)]
        piece.judge(f"{n} clients, requests/s, laps / stock", rates[0] / rates[1])


def run(args: argparse.Namespace) -> Piece:
    """Measure, simulate and judge the paper's claims."""
    prepare(args)
    device: Device = args.device
    real, sim = measured(args), simulated(args)
    text = (
        f"{args.servers} real prefill servers of this machine, each with {device.what}; a decode server; routers. The "
        f"mix of the piece emulated, {args.seconds:g} s a load; {args.servers} stock servers can do {args.rate:.1f} "
        f"requests/s (simulated). SLO: a TTFT of {SLO_S:g} s, stretched as the device is. This machine's host is in "
        "what was measured, the profile's in what was simulated."
    )
    title = f"Emulated: {args.servers} server(s), {device.name.removeprefix('emulated ')}"
    judged = claims.rows(real, sim, "32b" if "32b" in device.name else "8b", args.servers)
    piece = Piece(args.out.name, title, text, args.seed, [Table("Claims of the paper", claims.HEADS, judged)])
    tell(piece, (real, sim), args)
    lasted = [e["lasted_over_profile"]["median"] for of in real["emulator"].values() for e in of]
    piece.judge("step as it lasted over the profile, furthest median", max(lasted, key=lambda x: abs(x - 1.0)))
    piece.data = {"device": device.name, "emulated": real, "simulated": sim}
    return piece


COMMAND = Command("benchmark.fidelity fleet", __doc__, run, options, out="emulated-fleet", seed=1, every=True)
