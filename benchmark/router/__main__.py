"""The router against stock MiniLB and SGLang's Rust gateway, all in one run.

    ./run bench router --echo     what a router itself costs: instant back ends, requests/s and latency
    ./run bench router --agents   four emulated prefill servers: TTFT of agents' turns, and the prefixes kept
    ./run bench router --real     three real prefill servers and a decode server: TTFT of chats among documents

The routers take turns. Figures are medians over rounds; ratios are medians of the rounds' ratios.
"""

from __future__ import annotations

import sys

from benchmark.results import Command, Namespace, Parser, Piece, count, positive
from benchmark.rig import REPO, devices
from benchmark.router import agents, echo, real

MODES = {"echo": echo.run, "real": real.run, "agents": agents.run}


def options(p: Parser) -> None:
    mode = p.add_mutually_exclusive_group(required=True)
    for name in MODES:
        mode.add_argument(f"--{name}", dest="mode", action="store_const", const=name)
    p.add_argument("--seconds", type=positive, help="duration of a round of --echo (3), --real (20) or --agents (120)")
    p.add_argument("--prefill", type=count, help="prefill servers of --real (3) or --agents (4)")
    p.add_argument("--share", type=positive, default=0.7, help="load of --agents over the servers' capacity (0.7)")
    p.add_argument("--laps-prefill", action="store_true", help="--real with LAPS prefill servers, not stock ones")
    devices.add_device(p, devices.CPU)


def run(args: Namespace) -> Piece:
    args.out = args.out or REPO / "out" / f"router-{args.mode}"
    return MODES[args.mode](args)


COMMAND = Command("./run bench router", __doc__, run, options, rounds=5)

if __name__ == "__main__":
    sys.exit(COMMAND.main())
