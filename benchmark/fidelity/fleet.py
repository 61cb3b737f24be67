"""Emulated prefill servers behind a router: SGLang's router with stock fcfs, and the router and scheduler of LAPS.

All servers are real and run on this machine: prefill servers whose steps last as long as the profile says, a decode
server that gets KV over Mooncake, and routers. The load is the mix of ``policies`` at shares of the stock servers'
capacity. The simulator runs the same load, and closed loops. For the paper's claims about one and several instances.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from laps_plan.profile import Profile
from laps_plan.traffic.job import Job
from laps_plan.traffic.streams import Closed

from benchmark.fidelity import claims
from benchmark.fidelity.compare import Simulator, drawn, quantiles
from benchmark.fidelity.policies import capacity, emulator
from benchmark.load import Answer, Prompts
from benchmark.results import FAILED, Column, Command, Comparison, Namespace, Parser, Piece, Table
from benchmark.rig import FCFS, Device, devices, warm_up
from benchmark.rig import LAPS as LAPS_PREFILL
from benchmark.router import LAPS, STOCK, site
from benchmark.sim.loads import MIX

BASE = "stock"
WAYS = {
    BASE: (FCFS, STOCK, "round-robin"),
    "stock, gateway": (FCFS, "gateway, power of two", "least-load"),
    "laps servers": (LAPS_PREFILL, STOCK, "round-robin"),
    "laps": (LAPS_PREFILL, LAPS, "pools"),
}
"""Name -> prefill variant, router, router in the simulator. MiniLB picks at random: plain data parallelism."""
ALONE, SEVERAL = (BASE, "laps servers"), (BASE, "stock, gateway", "laps")
"""Compared ways: with one server, and with several servers."""
LOADS = (0.5, 0.7, 0.85)
CLIENTS = (8, 32)
"""Clients of the closed loops, for each server."""
CYCLES = 400
"""Requests of each client in a closed loop: enough that even a prompt that is parked for long ends in the loop."""
SLO_S = 0.4
"""TTFT objective of the paper (seconds), stretched like the device."""
RATES = (Column("over the SLO", ("over",), ".1%"), Column("requests/s", ("rate",), ".1f"))
TIMES = {"short_p90": "short P90", "long_p90": "long P90", "mean": "mean"}
COLUMNS = (*(Column(head, (key,), scale=1e3) for key, head in TIMES.items()), *RATES, FAILED)
Runs = dict[str, Any]
"""Way -> "open" or "closed" -> load or clients -> figure -> value; times in seconds."""


def options(p: Parser) -> None:
    devices.add_device(p, devices.H200)
    p.add_argument("--servers", type=int, default=4, help="(4)")


def figures(new: Sequence[int], ttft: Sequence[float], rate: float, slo_s: float, **more: Any) -> dict[str, Any]:
    """Return quantiles, mean TTFT (seconds), requests/s, and the share of TTFTs above the SLO."""
    found = quantiles(new, ttft)
    return {
        "short_p90": found["short P90"], "long_p90": found["long P90"], "rate": rate, "mean": statistics.fmean(ttft),
        "over": sum(t > slo_s for t in ttft) / len(ttft), "failed": 0, **more,
    }  # fmt: skip


def measured(args: Namespace, loads: dict[str, list[Job]]) -> tuple[Runs, list[float]]:
    """Run all loads on servers; return figures, and for each server the median of measured over profiled step time."""
    device: Device = args.device
    prompts, found, lasted = Prompts(device.vocabulary, args.seed, device.longest, prefill_only=False), Runs(), []
    decode = ("--max-total-tokens", "524288", "--max-running-requests", "256")
    for variant in (FCFS, LAPS_PREFILL):
        mine = {name: WAYS[name][1] for name in args.ways if WAYS[name][0] == variant}
        checkpoint, routers = device.checkpoint(), list(mine.values())
        with site(device, checkpoint, variant, args.servers, routers, args.out, args.say, decode=decode) as up:
            for name, router in mine.items():
                warm_up(up.routers[router], prompts, 8192)
                found[name] = {"open": {}}
                for load, jobs in loads.items():
                    args.say(f"{name}, {float(load):.0%}")
                    answers = up.replay(router, jobs, prompts.bodies(jobs, args.seed))
                    found[name]["open"][load] = _open(answers, args.slo_s)
            lasted += [emulator(prefill)["lasted_over_profile"]["median"] for prefill in up.prefills]
    return found, lasted


def _open(answers: Sequence[Answer], slo_s: float) -> dict[str, Any]:
    good = [(a, a.ttft_s) for a in answers if a.ttft_s is not None]
    new, ttft = [a.job.new for a, _ in good], [ttft_s for _, ttft_s in good]
    rate = len(good) / max(a.sent_s + ttft_s for a, ttft_s in good)
    return figures(new, ttft, rate, slo_s, failed=len(answers) - len(good))


def simulated(args: Namespace, loads: dict[str, list[Job]]) -> Runs:
    """Simulate the same loads, and closed loops."""
    found, slo_s, simulator = Runs(), args.slo_s, Simulator(args.profile, args.device.chunk, args.device.knobs)
    for name in args.ways:
        variant, _, router = WAYS[name]
        found[name] = {"open": {}, "closed": {}}
        for load, jobs in loads.items():
            o = simulator.run(variant, jobs, servers=args.servers, router=router)
            found[name]["open"][load] = figures(o.record.new, o.record.ttft, o.rate, slo_s)
        for clients in (n * args.servers for n in CLIENTS):
            work = Closed(MIX, clients, CYCLES * clients, args.seed)
            o = simulator.run(variant, work, servers=args.servers, router=router)
            steady = o.steady(clients).require(f"{name}, simulated")
            more = {"fixed": o.batches * o.profile.coefficients.step_s / sum(o.busy_s), "steady": asdict(steady)}
            told = figures(o.record.new, o.record.ttft, steady.requests_per_s, slo_s, **more)
            found[name]["closed"][str(clients)] = told
    return found


def tell(piece: Piece, real: Runs, sim: Runs, ways: Sequence[str]) -> None:
    """Add tables of emulated and simulated figures side by side, and the ratios of LAPS to stock."""
    for load in real[BASE]["open"]:
        seen, simulated = (Comparison({name: [runs[name]["open"][load]] for name in ways}) for runs in (real, sim))
        title = f"At {float(load):.0%}: TTFT in ms, emulated / simulated"
        piece.tables.append(seen.table(title, "", COLUMNS, beside=simulated))
        for key, words in {**TIMES, "rate": "requests/s"}.items():
            ratio = real[ways[-1]]["open"][load][key] / real[BASE]["open"][load][key]
            piece.judge(f"at {float(load):.0%}, {words}, laps / stock", ratio)
    loops = Comparison({n: [{name: sim[name]["closed"][n] for name in ways}] for n in sim[BASE]["closed"]})
    columns = [replace(c, head=f"{name}, {c.head}", path=(name, *c.path)) for c in reversed(RATES) for name in ways]
    piece.tables.append(loops.table("Closed loops, simulated", "clients", columns))


def run(args: Namespace) -> Piece:
    args.ways = SEVERAL if args.servers > 1 else ALONE
    device: Device = args.device
    args.slo_s, args.profile = device.slow * SLO_S, Profile.load(device.laps["profile"])
    rate = args.servers * capacity(args.profile, device.chunk, args.seed)
    loads = {f"{x:g}": drawn(MIX, x * rate, args.seconds, f"{args.seed}/{x}") for x in LOADS}
    real, lasted = measured(args, loads)
    sim = simulated(args, loads)
    text = (
        f"{args.servers} real prefill servers of this machine, each with {device.what}; a decode server; routers. The "
        f"mix of the piece emulated, {args.seconds:g} s a load; {args.servers} stock servers can do {rate:.1f} "
        f"requests/s (simulated). SLO: a TTFT of {SLO_S:g} s, stretched as the device is. This machine's host is in "
        "what was measured, the profile's in what was simulated. Closed loops are simulated."
    )
    title = f"Emulated: {args.servers} server(s), {device.name.removeprefix('emulated ')}"
    judged = claims.rows(real, sim, "32b" if "32b" in device.name else "8b", args.servers)
    piece = Piece(args.out.name, title, text, args.seed, [Table("Claims of the paper", claims.HEADS, judged)])
    tell(piece, real, sim, args.ways)
    piece.judge("step as it lasted over the profile, furthest median", max(lasted, key=lambda x: abs(x - 1.0)))
    piece.data = {"device": device.name, "emulated": real, "simulated": sim}
    return piece


COMMAND = Command(
    "benchmark.fidelity.fleet", __doc__, run, options, out="emulated-fleet", seed=1, seconds=25.0, every=True
)

if __name__ == "__main__":
    sys.exit(COMMAND.main())
