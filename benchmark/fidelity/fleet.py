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
from benchmark.results.piece import Figure, Parser, Piece, Table
from benchmark.rig.devices import Device
from benchmark.rig.fleet import warm_up
from benchmark.rig.progress import Progress
from benchmark.rig.variants import FCFS
from benchmark.rig.variants import LAPS as LAPS_PREFILL
from benchmark.router import LAPS, STOCK, site

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
NAMES = {"short_p90": "short P90", "long_p90": "long P90", "mean": "mean", "rate": "requests/s"}
Runs = dict[str, Any]
"""Way -> "open" or "closed" -> load or clients -> figure -> value; times in seconds."""


def options(p: Parser) -> None:
    """Add the options of this command."""
    compare.add_load(p, 45.0)
    p.add_argument("--servers", type=int, default=4, help="(4)")
    p.add_argument("--loads", type=float, nargs="+", default=list(LOADS), help="shares of the stock servers' capacity")
    p.add_argument("--clients", type=int, nargs="+", help="clients of the closed loops (8 and 32 for each server)")
    compare.add_again(p)


def ways(args: argparse.Namespace) -> Sequence[str]:
    """Return the ways to compare."""
    return tuple(WAYS) if args.servers > 1 else ALONE


def closed(ttft: Sequence[float], rate: float, slo_s: float) -> dict[str, float]:
    """Return requests/s, mean TTFT (seconds), and the share of TTFTs above the SLO."""
    return {"rate": rate, "mean": statistics.fmean(ttft), "over": sum(t > slo_s for t in ttft) / len(ttft)}


def opened(new: Sequence[int], ttft: Sequence[float], rate: float, slo_s: float, failed: int = 0) -> dict[str, float]:
    """Return the figures of all answered requests of an open load."""
    found = quantiles(new, ttft)
    p90 = {"short_p90": found["short P90"], "long_p90": found["long P90"]}
    return {**p90, **closed(ttft, rate, slo_s), "failed": failed}


def measured(args: argparse.Namespace, device: Device, rate: float, slo_s: float) -> Runs:
    """Run all loads on servers."""
    say = Progress()
    prompts = Prompts(device.vocabulary, args.seed, device.longest, reuse=False, prefill_only=False)
    found: Runs = {}
    at = replace(device, chunk=args.chunk)
    for variant in (FCFS, LAPS_PREFILL):
        mine = [name for name in ways(args) if WAYS[name][0] == variant]
        kinds = [WAYS[name][1] for name in mine]
        with site(
            at, device.checkpoint(), variant, args.servers, kinds, args.out, say,
            decode=("--max-total-tokens", "524288", "--max-running-requests", "256"),
        ) as up:  # fmt: skip
            for name in mine:
                target = up.routers[WAYS[name][1]]
                warm_up(target, prompts, 8192)
                found[name] = {"open": {}, "closed": {}}
                for load in args.loads:
                    say(f"{name}, {load:.0%}")
                    found[name]["open"][f"{load:g}"] = _open(target, prompts, load * rate, slo_s, f"{load}", args)
                    up.flush()
                rng, draw = random.Random(args.seed), sizes()
                for clients in args.clients:
                    say(f"{name}, {clients} clients")
                    jobs = [Job(0.0, draw(rng)) for _ in range(BODIES)]
                    found[name]["closed"][str(clients)] = _closed(target, prompts, jobs, clients, slo_s, name, args)
                    up.flush()
            found.setdefault("emulator", {})[variant] = [emulator(prefill) for prefill in up.prefills]
    return found


def _open(
    target: Target, prompts: Prompts, rate: float, slo_s: float, load: str, args: argparse.Namespace
) -> dict[str, float]:
    jobs = drawn(sizes(), rate, args.seconds, f"{args.seed}/{load}")
    answers = asyncio.run(client.replay(target, jobs, prompts.bodies(jobs, args.seed), PATIENCE_S))
    good = [(a, a.ttft_s) for a in answers if a.ttft_s is not None]
    took_s = max(a.sent_s + ttft_s for a, ttft_s in good)
    new, ttft = [a.job.new for a, _ in good], [ttft_s for _, ttft_s in good]
    return opened(new, ttft, len(good) / took_s, slo_s, len(answers) - len(good))


def _closed(
    target: Target, prompts: Prompts, jobs: Sequence[Job], clients: int, slo_s: float, name: str,
    args: argparse.Namespace,
) -> dict[str, Any]:  # fmt: skip
    bodies, new = prompts.bodies(jobs, clients), [job.new for job in jobs]
    load = client.closed(target, bodies, clients, args.seconds, run_in_s=args.seconds / 4, tokens=new)
    loop = asyncio.run(load)
    steady = loop.steady.require(name).as_dict()
    return {**closed(loop.ttft_s, loop.rate, slo_s), "failed": loop.failed, "steady": steady}


def simulated(args: argparse.Namespace, device: Device, profile: Profile, rate: float, slo_s: float) -> Runs:
    """Simulate the same loads."""
    knobs = {k: v for k, v in device.laps.items() if k != "profile"}
    found: Runs = {}
    for name in ways(args):
        variant, _, router = WAYS[name]
        how: dict[str, Any] = {
            "servers": args.servers, "router": router, "chunk": args.chunk, "knobs": knobs, "overlap": True,
        }  # fmt: skip
        found[name] = {"open": {}, "closed": {}}
        for load in args.loads:
            jobs = drawn(sizes(), load * rate, args.seconds, f"{args.seed}/{load}")
            o = simulate(VARIANTS[variant], Trace(jobs), profile, **how)
            found[name]["open"][f"{load:g}"] = opened(o.record.new, o.record.ttft, o.rate, slo_s)
        for clients in args.clients:
            # Long enough that a prompt which is parked for long ends in it.
            n = max(round(args.seconds * rate), CYCLES * clients)
            o = simulate(VARIANTS[variant], Closed(sizes(), clients, n, args.seed), profile, **how)
            steady = o.steady(clients).require(f"{name}, simulated")
            fixed_s = o.batches * o.profile.coefficients.step_s
            found[name]["closed"][str(clients)] = {
                **closed(o.record.ttft, steady.requests_per_s, slo_s), "fixed": fixed_s / sum(o.busy_s),
                "steady": steady.as_dict(),
            }  # fmt: skip
    return found


def tables(real: Runs, sim: Runs, args: argparse.Namespace) -> tuple[list[Table], list[Figure]]:
    """Return emulated and simulated figures side by side, and LAPS's over stock's."""
    found, figures, mine = [], [], ways(args)[-1]
    for load in (f"{load:g}" for load in args.loads):
        rows = []
        for name in ways(args):
            r, s = (x[name]["open"][load] for x in (real, sim))
            ms = (f"{1e3 * r[k]:.0f} / {1e3 * s[k]:.0f}" for k in ("short_p90", "long_p90", "mean"))
            over, rate = f"{r['over']:.1%} / {s['over']:.1%}", f"{r['rate']:.1f} / {s['rate']:.1f}"
            rows.append((name, *ms, over, rate, str(r["failed"])))
        heads = ("", "short P90", "long P90", "mean", "over the SLO", "requests/s", "failed")
        found.append(Table(f"At {float(load):.0%}: TTFT in ms, emulated / simulated", heads, rows))
        for key, words in NAMES.items():
            over_stock = real[mine]["open"][load][key] / real[BASE]["open"][load][key]
            figures.append(Figure(f"at {float(load):.0%}, {words}, laps / stock", over_stock))
    loops = []
    for clients in map(str, args.clients):
        pairs = [[x[name]["closed"][clients] for x in (real, sim)] for name in ways(args)]
        rates = (f"{r['rate']:.1f} / {s['rate']:.1f}" for r, s in pairs)
        loops.append((clients, *rates, *(f"{r['over']:.1%} / {s['over']:.1%}" for r, s in pairs)))
        over_stock = pairs[-1][0]["rate"] / pairs[0][0]["rate"]
        figures.append(Figure(f"{clients} clients, requests/s, laps / stock", over_stock))
    columns = ("clients", *(f"{name}, {what}" for what in ("requests/s", "over the SLO") for name in ways(args)))
    return [*found, Table("Closed loops: emulated / simulated", columns, loops)], figures


def run(args: argparse.Namespace) -> Piece:
    """Measure, simulate and judge the paper's claims."""
    args.clients = args.clients or [n * args.servers for n in CLIENTS]
    device: Device = args.device
    profile, slo_s = Profile.load(device.laps["profile"]), device.slow * SLO_S
    rate = args.servers * capacity(profile, args.chunk, args.seed)
    real = compare.again(args, lambda keep: keep(measured(args, device, rate, slo_s)))
    sim = simulated(args, device, profile, rate, slo_s)
    found, figures = tables(real, sim, args)
    model = "32b" if "32b" in device.name else "8b"
    judged = Table("Claims of the paper", claims.HEADS, claims.rows(real, sim, model, args.servers))
    lasted = [e["lasted_over_profile"]["median"] for of in real["emulator"].values() for e in of]
    furthest = max(lasted, key=lambda x: abs(x - 1.0))
    return Piece(
        args.out.name,
        f"Emulated: {args.servers} server(s), {device.name.removeprefix('emulated ')}",
        f"{args.servers} real prefill servers of this machine, each with {device.what}; a decode server; routers. The "
        f"mix of the piece emulated, {args.seconds:g} s a load; {args.servers} stock servers can do {rate:.1f} "
        f"requests/s (simulated). SLO: a TTFT of {SLO_S:g} s, stretched as the device is. This machine's host is in "
        "what was measured, the profile's in what was simulated.",
        args.seed,
        [judged, *found],
        [*figures, Figure("step as it lasted over the profile, furthest median", furthest)],
        data={"device": device.name, "emulated": real, "simulated": sim},
    )
