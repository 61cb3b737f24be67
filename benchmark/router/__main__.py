"""The router against stock MiniLB and SGLang's Rust gateway, all in one run.

    ./run bench router --echo     what a router itself costs: instant back ends, requests/s and latency
    ./run bench router --workers  one router process and four behind one port: instant back ends, requests/s
    ./run bench router --mix      short share 90% -> 10% -> 90%: how fast and with how many moves pools follow
    ./run bench router --fleet    three routers before eight servers: nothing lost, all agree on the pools
    ./run bench router --agents   four emulated prefill servers: TTFT of agents' turns, and the prefixes kept
    ./run bench router --real     three real prefill servers and a decode server: TTFT of chats among documents

Rounds of the routers alternate, and figures are medians over rounds (ratios: medians of the rounds' ratios).
"""

from __future__ import annotations

import argparse
import sys

import uvloop

from benchmark.results import Command, Parser, Piece, positive
from benchmark.rig import devices
from benchmark.rig.model import REPO
from benchmark.router import agents, echo, pools, real

MODES = {
    "echo": echo.run, "workers": echo.run_workers, "mix": pools.run, "fleet": pools.run_fleet, "real": real.run,
    "agents": agents.run,
}  # fmt: skip


def options(p: Parser) -> None:
    """Add the options of this command."""
    mode = p.add_mutually_exclusive_group(required=True)
    for name in MODES:
        mode.add_argument(f"--{name}", dest="mode", action="store_const", const=name)
    mode.add_argument("--serve-echo", type=int, nargs="+", metavar="PORT", help=argparse.SUPPRESS)
    words = (
        "length of a round of --echo and --workers (3), --real (20) or --agents (120), of a phase of --mix "
        "(12 periods) or --fleet (60)"
    )
    p.add_argument("--seconds", type=positive, help=words)
    p.add_argument("--prefill", type=int, nargs="+", help="prefill servers of --mix, --real (3) or --agents (4)")
    p.add_argument("--share", type=positive, default=0.7, help="load of --agents over the servers' capacity (0.7)")
    p.add_argument("--laps-prefill", action="store_true", help="--real with LAPS prefill servers, not stock ones")
    devices.add_device(p, devices.CPU)
    p.add_argument("--period", type=float, default=2.0, help="control period of --mix, --fleet (seconds)")
    p.add_argument("--phases", type=int, default=10, help="phases of --fleet (10)")


def run(args: argparse.Namespace) -> Piece:
    """Measure what is asked for."""
    if args.serve_echo:
        uvloop.run(echo.serve(args.serve_echo))
        raise SystemExit
    args.out = args.out or REPO / "out" / f"router-{args.mode}"
    return MODES[args.mode](args)


COMMAND = Command("./run bench router", __doc__, run, options, rounds=5)

if __name__ == "__main__":
    sys.exit(COMMAND.main())
