"""Several emulated prefill servers behind a router: SGLang's own with stock fcfs, and the router and scheduler of LAPS.

    python -m benchmark.emulated_fleet --device h200-qwen3-32b,slow=6 --servers 4

Real prefill servers whose steps last as long as the profile says, a real decode server, KV over Mooncake, and real
routers, all on this machine. The mix of ``benchmark.emulated``, open at shares of the stock servers' capacity, and in
closed loops; the simulator runs the same. For the paper's claims about several instances.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from laps_plan.profile import Profile
from laps_plan.sim.variants import VARIANTS
from laps_plan.sim.variants import run as simulate
from laps_plan.traffic.job import Job
from laps_plan.traffic.streams import Closed, Trace

from benchmark.emulated import arrivals, capacity, sizes, told
from benchmark.load import client
from benchmark.load.connection import Target
from benchmark.load.prompts import Prompts
from benchmark.results.piece import Figure, Piece, Table, parser, positive
from benchmark.rig import devices, servers
from benchmark.rig.devices import Device
from benchmark.rig.fleet import command_line, flush, warm_up
from benchmark.rig.progress import Progress
from benchmark.rig.variants import BUILT_IN, FCFS
from benchmark.rig.variants import LAPS as LAPS_PREFILL
from benchmark.sim.calibration import quantiles
from benchmark.suites.claims import HEADS, Claims
from benchmark.suites.router import LAPS, STOCK, routers

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
SLO_S = 0.4
"""SLO of the paper (seconds); stretched like the device."""
PATIENCE_S = 120.0


def ways(args: argparse.Namespace) -> Sequence[str]:
    """Return the ways to compare."""
    return tuple(WAYS) if args.servers > 1 else ALONE


@dataclass
class Seen:
    """Figures of one run. Times in seconds, unscaled."""

    short_p90: float
    long_p90: float
    mean: float
    over: float
    """Share of TTFTs above the SLO (0..1)."""
    rate: float
    failed: int = 0

    @classmethod
    def of(cls, tokens: Sequence[int], ttft: Sequence[float], rate: float, slo_s: float, failed: int = 0) -> Seen:
        """Return the figures of all answered requests."""
        found = quantiles(tokens, ttft)
        over = sum(t > slo_s for t in ttft) / len(ttft)
        return cls(found["short P90"], found["long P90"], statistics.fmean(ttft), over, rate, failed)


@contextmanager
def up(device: Device, chunk: int, variant: str, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Start prefill servers of a variant, a decode server and the wanted routers in front of them; yield their
    addresses."""
    folder, logs = device.checkpoint(), args.out / "logs"
    flags = ("--chunked-prefill-size", str(chunk), *device.args_of(BUILT_IN[variant]))
    prefills = [
        servers.prefill(folder, logs / f"{variant}{i}.log", *flags, env=device.env, name=f"{variant} {i}")
        for i in range(args.servers)
    ]
    pool = ("--max-total-tokens", "524288", "--max-running-requests", "256")
    decode = servers.decode(folder, logs / f"decode-{variant}.log", *pool, env=device.env)
    kinds = [WAYS[name][1] for name in ways(args) if WAYS[name][0] == variant]
    up = routers(prefills, [decode], args.out / variant, kinds)
    with servers.running(*prefills, decode), servers.running(*up.values()):
        yield {
            "routers": {kind: Target(servers.HOST, r.port) for kind, r in up.items()},
            "prefills": [Target(servers.HOST, p.port) for p in prefills],
        }


CYCLES = 200
"""Least number of requests of each client in a simulated closed loop."""


def closed(ttft: Sequence[float], rate: float, slo_s: float) -> dict[str, float]:
    """Return figures of a closed loop: requests/s, mean TTFT (seconds), share of TTFTs above the SLO."""
    return {"rate": rate, "mean": statistics.fmean(ttft), "over": sum(t > slo_s for t in ttft) / len(ttft)}


def gather(args: argparse.Namespace, device: Device, rate: float, slo_s: float) -> dict[str, Any]:
    """Run all loads on servers. Returns way -> load -> figures."""
    say = Progress()
    prompts = Prompts(device.vocabulary, args.seed, device.longest, reuse=False, prefill_only=False)
    found: dict[str, Any] = {}
    for variant in (FCFS, LAPS_PREFILL):
        say(f"starting {args.servers} servers with {variant}")
        with up(device, args.chunk, variant, args) as there:
            for name in ways(args):
                of, kind, _ = WAYS[name]
                if of != variant:
                    continue
                target = there["routers"][kind]
                warm_up(target, prompts, 8192)
                found[name] = {"open": {}, "closed": {}}
                for load in args.loads:
                    say(f"{name}, {load:.0%}")
                    jobs = arrivals(load * rate, args.seconds, f"{args.seed}/{load}")
                    bodies = prompts.bodies(jobs, args.seed)
                    answers = asyncio.run(client.replay(target, jobs, bodies, PATIENCE_S))
                    good = [a for a in answers if a.ttft_s is not None]
                    took = max(a.sent_s + (a.ttft_s or 0.0) for a in good)
                    seen = Seen.of(
                        [a.job.new for a in good], [a.ttft_s or 0.0 for a in good], len(good) / took, slo_s,
                        len(answers) - len(good),
                    )  # fmt: skip
                    found[name]["open"][f"{load:g}"] = vars(seen)
                    for prefill in there["prefills"]:
                        flush(prefill)
                rng, draw = random.Random(args.seed), sizes()
                for clients in args.clients:
                    say(f"{name}, {clients} clients")
                    jobs = [Job(0.0, draw(rng)) for _ in range(BODIES)]
                    loop = asyncio.run(
                        client.closed(
                            target,
                            prompts.bodies(jobs, clients),
                            clients,
                            args.seconds,
                            run_in_s=args.seconds / 4,
                            tokens=[job.new for job in jobs],
                        )
                    )
                    found[name]["closed"][str(clients)] = {
                        **closed(loop.ttft_s, loop.rate, slo_s), "failed": loop.failed,
                        "steady": loop.steady.require(name).as_dict(),
                    }  # fmt: skip
                    for prefill in there["prefills"]:
                        flush(prefill)
            emulators = [told(prefill) for prefill in there["prefills"]]
            found.setdefault("emulator", {})[variant] = emulators
    return found


def simulated(args: argparse.Namespace, device: Device, profile: Profile, rate: float, slo_s: float) -> dict[str, Any]:
    """Simulate the same loads."""
    knobs = {k: v for k, v in device.laps.items() if k != "profile"}
    found: dict[str, Any] = {}
    for name in ways(args):
        variant, _, router = WAYS[name]
        how: dict[str, Any] = {
            "servers": args.servers,
            "router": router,
            "chunk": args.chunk,
            "knobs": knobs,
            "overlap": True,
        }
        found[name] = {"open": {}, "closed": {}}
        for load in args.loads:
            jobs = arrivals(load * rate, args.seconds, f"{args.seed}/{load}")
            o = simulate(VARIANTS[variant], Trace(jobs), profile, **how)
            found[name]["open"][f"{load:g}"] = vars(Seen.of(o.record.new, o.record.ttft, o.rate, slo_s))
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


def report(real: dict[str, Any], sim: dict[str, Any], args: argparse.Namespace, device: Device, rate: float) -> Piece:
    """Return the piece for the report: emulated and simulated figures side by side."""
    tables, figures = [], []
    for load in args.loads:
        rows = []
        for name in ways(args):
            r, s = (x[name]["open"][f"{load:g}"] for x in (real, sim))
            ms = (f"{1e3 * r[k]:.0f} / {1e3 * s[k]:.0f}" for k in ("short_p90", "long_p90", "mean"))
            rows.append((name, *ms, f"{r['over']:.1%} / {s['over']:.1%}", f"{r['rate']:.1f} / {s['rate']:.1f}",
                         str(r["failed"])))  # fmt: skip
        heads = ("", "short P90", "long P90", "mean", "over the SLO", "requests/s", "failed")
        tables.append(Table(f"At {load:.0%}: TTFT in ms, emulated / simulated", heads, rows))
        base, mine = (real[name]["open"][f"{load:g}"] for name in (BASE, ways(args)[-1]))
        names = {"short_p90": "short P90", "long_p90": "long P90", "mean": "mean", "rate": "requests/s"}
        for key, words in names.items():
            figures.append(Figure(f"at {load:.0%}, {words}, laps / stock", mine[key] / base[key]))
    rows = []
    for clients in args.clients:
        pairs = [[x[name]["closed"][str(clients)] for x in (real, sim)] for name in ways(args)]
        rates = (f"{r['rate']:.1f} / {s['rate']:.1f}" for r, s in pairs)
        rows.append((str(clients), *rates, *(f"{r['over']:.1%} / {s['over']:.1%}" for r, s in pairs)))
        figures.append(
            Figure(f"{clients} clients, requests/s, laps / stock", pairs[-1][0]["rate"] / pairs[0][0]["rate"])
        )
    columns = ("clients", *(f"{name}, {what}" for what in ("requests/s", "over the SLO") for name in ways(args)))
    tables.append(Table("Closed loops: emulated / simulated", columns, rows))
    model = "32b" if "32b" in device.name else "8b"
    tables.insert(0, Table("Claims of the paper", HEADS, Claims(real, sim, model, args.servers).rows))
    lasted = [e["lasted_over_profile"]["median"] for of in real["emulator"].values() for e in of]
    figures.append(
        Figure("step as it lasted over the profile, furthest median", max(lasted, key=lambda x: abs(x - 1.0)))
    )
    return Piece(
        args.out.name,
        f"Emulated: {args.servers} server(s), {device.name.removeprefix('emulated ')}",
        f"{args.servers} real prefill servers of this machine, each with {device.what}; a decode server; routers. The "
        f"mix of benchmark.emulated, {args.seconds:g} s a load; {args.servers} stock servers can do {rate:.1f} "
        f"requests/s (simulated). SLO: a TTFT of {SLO_S:g} s, stretched as the device is. This machine's host is in "
        "what was measured, the profile's in what was simulated.",
        args.seed,
        tables,
        figures,
        data={"device": device.name, "emulated": real, "simulated": sim},
    )


def main(argv: Sequence[str] | None = None) -> int:
    p = parser("python -m benchmark.emulated_fleet", __doc__, "emulated-fleet", seed=1, whole=True)
    devices.add_emulated(p, "h200-qwen3-32b,slow=6")
    p.add_argument("--servers", type=int, default=4)
    p.add_argument("--chunk", type=int, default=8192, help="--chunked-prefill-size, tokens (8192)")
    p.add_argument("--seconds", type=positive, default=45.0, help="duration of arrivals at each load (45)")
    p.add_argument("--loads", type=float, nargs="+", default=list(LOADS), help="shares of the stock servers' capacity")
    p.add_argument("--clients", type=int, nargs="+", help="clients of the closed loops (8 and 32 for each server)")
    p.add_argument("--again", action="store_true", help="only simulate the loads of an earlier run in --out")
    args = p.parse_args(argv)
    args.clients = args.clients or [n * args.servers for n in CLIENTS]
    with command_line("emulated_fleet"):
        device: Device = args.device
        profile = Profile.load(device.laps["profile"])
        rate = args.servers * capacity(profile, args.chunk, args.seed)
        args.out.mkdir(parents=True, exist_ok=True)
        raw: Path = args.out / "raw.json"
        if not args.again:
            raw.write_text(json.dumps(gather(args, device, rate, device.slow * SLO_S)))
        real = json.loads(raw.read_text())
        sim = simulated(args, device, profile, rate, device.slow * SLO_S)
        report(real, sim, args, device, rate).leave(args.out, "benchmark.emulated_fleet", argv, every=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
