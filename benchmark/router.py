"""The router against stock MiniLB, both in one run.

    python -m benchmark.router --echo     what the router itself costs: instant back ends, requests/s and latency
    python -m benchmark.router --mix      short share 90% -> 10% -> 90%: how fast and with how many moves pools follow
    python -m benchmark.router --real     three real prefill servers and a decode server: TTFT of short chats among long

Rounds of both routers alternate, and figures are medians over rounds (ratios: medians of the rounds' ratios).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import uvloop

from benchmark.results.piece import parser
from benchmark.rig.fleet import command_line
from benchmark.rig.progress import Progress
from benchmark.suites.router import echo, mix, real


def main(argv: Sequence[str] | None = None) -> int:
    p = parser("./run bench router", __doc__, "router-MODE", rounds="(5)", whole=True)
    mode = p.add_mutually_exclusive_group(required=True)
    mode.add_argument("--echo", action="store_true")
    mode.add_argument("--mix", action="store_true")
    mode.add_argument("--real", action="store_true")
    mode.add_argument("--serve-echo", type=int, nargs="+", metavar="PORT", help=argparse.SUPPRESS)
    p.add_argument(
        "--seconds", type=float, help="length of a round of --echo (3) or --real (20), of a phase of --mix (12 periods)"
    )
    p.add_argument("--prefill", type=int, nargs="+", default=[4, 8], help="prefill servers of --mix")
    p.add_argument("--laps-prefill", action="store_true", help="--real with LAPS prefill servers, not stock ones")
    p.add_argument("--period", type=float, default=2.0, help="control period of --mix (seconds)")
    args = p.parse_args(argv)
    if args.serve_echo:
        uvloop.run(echo.serve(args.serve_echo))
        return 0
    say = Progress()
    name = "echo" if args.echo else "mix" if args.mix else "real"
    out = args.out.with_name(args.out.name.replace("MODE", name))
    with command_line("bench router"):
        if args.echo:
            piece = echo.run(out, args.rounds, args.seconds or 3.0, say)
        elif args.mix:
            piece = mix.run(out, args.prefill, args.period, args.seconds or 12 * args.period, say)
        else:
            piece = real.run(out, args.rounds, args.seconds or 20.0, args.laps_prefill, say)
    piece.leave(out, "benchmark.router", argv)
    return 0


if __name__ == "__main__":
    sys.exit(main())
