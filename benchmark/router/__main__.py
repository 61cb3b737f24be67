"""The router against stock MiniLB and SGLang's Rust gateway, all in one run.

    python -m benchmark.router --echo     what a router itself costs: instant back ends, requests/s and latency
    python -m benchmark.router --workers  one router process and four behind one port: instant back ends, requests/s
    python -m benchmark.router --mix      short share 90% -> 10% -> 90%: how fast and with how many moves pools follow
    python -m benchmark.router --fleet    three routers before eight servers: nothing lost, all agree on the pools
    python -m benchmark.router --agents   four emulated prefill servers: TTFT of agents' turns, and the prefixes kept
    python -m benchmark.router --real     three real prefill servers and a decode server: TTFT of chats among documents

Rounds of the routers alternate, and figures are medians over rounds (ratios: medians of the rounds' ratios).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import uvloop

from benchmark.results.piece import parser, positive
from benchmark.rig import devices
from benchmark.rig.fleet import command_line
from benchmark.rig.progress import Progress
from benchmark.router import agents, echo, pools, real

AGENTS_ON = "emulated:h200-qwen3-8b,slow=4"
"""Default device of --agents: slow enough that two cores keep up with several servers."""


def main(argv: Sequence[str] | None = None) -> int:
    p = parser("./run bench router", __doc__, "router-MODE", rounds="(5)", whole=True)
    mode = p.add_mutually_exclusive_group(required=True)
    mode.add_argument("--echo", action="store_true")
    mode.add_argument("--workers", action="store_true")
    mode.add_argument("--mix", action="store_true")
    mode.add_argument("--fleet", action="store_true")
    mode.add_argument("--real", action="store_true")
    mode.add_argument("--agents", action="store_true")
    mode.add_argument("--serve-echo", type=int, nargs="+", metavar="PORT", help=argparse.SUPPRESS)
    p.add_argument(
        "--seconds",
        type=float,
        help="length of a round of --echo and --workers (3), --real (20) or --agents (120), of a phase of --mix "
        "(12 periods) or --fleet (60)",
    )
    p.add_argument("--prefill", type=int, nargs="+", help="prefill servers of --mix, --real (3) or --agents (4)")
    p.add_argument("--share", type=positive, default=0.7, help="load of --agents over the servers' capacity (0.7)")
    p.add_argument("--laps-prefill", action="store_true", help="--real with LAPS prefill servers, not stock ones")
    devices.add_emulated(p, devices.CPU)
    p.add_argument("--period", type=float, default=2.0, help="control period of --mix, --fleet (seconds)")
    p.add_argument("--phases", type=int, default=10, help="phases of --fleet (10)")
    args = p.parse_args(argv)
    if args.serve_echo:
        uvloop.run(echo.serve(args.serve_echo))
        return 0
    say = Progress()
    name = next(mode for mode in ("echo", "workers", "mix", "fleet", "real", "agents") if getattr(args, mode))
    out = args.out.with_name(args.out.name.replace("MODE", name))
    with command_line("bench router"):
        if args.echo:
            piece = echo.run(out, args.rounds, args.seconds or 3.0, say)
        elif args.workers:
            piece = echo.run_workers(out, args.rounds, args.seconds or 3.0, say)
        elif args.mix:
            piece = pools.run(out, args.prefill or [4, 8, 64], args.period, args.seconds or 12 * args.period, say)
        elif args.fleet:
            piece = pools.run_fleet(out, args.phases, args.seconds or 60.0, args.period, say)
        elif args.agents:
            device = args.device if args.device.emulated else devices.this(AGENTS_ON)
            piece = agents.run(
                out, args.rounds, args.seconds or 120.0, (args.prefill or [4])[0], args.share, device, say
            )
        else:
            piece = real.run(
                out, args.rounds, args.seconds or 20.0, (args.prefill or [3])[0], args.laps_prefill, args.device, say
            )
    piece.leave(out, "benchmark.router", argv)
    return 0


if __name__ == "__main__":
    sys.exit(main())
