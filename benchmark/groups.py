"""Data-parallel attention ranks that plan together, against SGLang's policies on each rank: real schedulers, emulated.

    ./run bench groups [--workload agents] [--ranks 4] [--slow K] [--rate R] [--rounds 3] [--seconds 60]

A prefill server with one scheduler process per rank, on an emulated group of eight H200 with DeepSeek-V3. Loads, at
rates given for the unscaled device: `mix`, 95% LMSYS lengths and 5% of 1,024 to 8,192 tokens, sent to the rank with
the fewest tokens in flight; `agents`, sessions of coding agents, whose turns follow their answers and go where their
history is. The servers run in turns. The simulator runs the same arrivals.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from typing import Any

from laps_plan.profile import Profile
from laps_plan.traffic.job import Job

from benchmark.load import client
from benchmark.load.prompts import Prompts
from benchmark.load.sessions import Homes, SessionPrompts
from benchmark.results.piece import Piece, parser, positive
from benchmark.results.rounds import in_turns
from benchmark.rig.fleet import Fleet, command_line, flush, get_json
from benchmark.rig.model import REPO
from benchmark.rig.progress import Progress
from benchmark.rig.variants import LAPS
from benchmark.suites.groups.compare import figures_of, piece_of, simulated
from benchmark.suites.groups.loads import LOADS, Load
from benchmark.suites.groups.servers import CHUNK, PROFILE, device_of, variants

PATIENCE_S = 120.0


def main(argv: Sequence[str] | None = None) -> int:
    p = parser("./run bench groups", __doc__, None, rounds="(3)", seed=1, seconds=60.0, whole=True)
    p.set_defaults(rounds=3)
    p.add_argument("--workload", choices=list(LOADS), default="mix", help="(mix)")
    p.add_argument("--ranks", type=int, default=4, help="data-parallel attention ranks (4)")
    slow, rate = (", ".join(f"{n} {getattr(x, key):g}" for n, x in LOADS.items()) for key in ("slow", "rate"))
    p.add_argument("--slow", type=positive, help=f"slowdown of the emulated device ({slow})")
    p.add_argument("--rate", type=positive, help=f"requests/s of the unscaled device ({rate})")
    args = p.parse_args(argv)
    load = LOADS[args.workload]
    args.slow, args.rate = args.slow or load.slow, args.rate or load.rate
    args.out = args.out or REPO / "out" / load.piece
    with command_line("bench groups"):
        piece = run(args, load)
    piece.leave(args.out, "benchmark.groups", argv)
    return 0


def run(args: argparse.Namespace, load: Load) -> Piece:
    """Run all rounds, the servers in turns."""
    say = Progress()
    profile = Profile.load(PROFILE).with_ranks(args.ranks).stretched(args.slow)
    device, found = device_of(load, args.slow, args.ranks), variants(load, args.ranks)
    kind = SessionPrompts if load.sessions else Prompts
    prompts = kind(device.vocabulary, args.seed, load.longest, reuse=load.sessions, prefill_only=True)
    rows: dict[int, list[Job]] = {
        i: load.jobs(args.rate, args.slow, args.seconds, f"{args.seed}/{i}") for i in range(args.rounds)
    }

    told: dict[str, list[dict[str, Any]]] = {}
    # One server at a time: each has as many schedulers as there are ranks.
    with Fleet(device, CHUNK, found, False, args.out, prompts, say, together=False) as fleet:

        def once(i: int, name: str) -> dict[str, float]:
            target, jobs = fleet.target(name), rows[i]
            flush(target)
            bodies = prompts.bodies(jobs, args.seed + i)
            # SGLang's controller goes by what ranks had in use some time ago: one rank gets several times as many
            # requests as another, and not the same ones from both servers.
            route = Homes(args.ranks, args.seed + i)
            answers = asyncio.run(client.replay(target, jobs, bodies, args.slow * PATIENCE_S, route))
            if any(a.ttft_s is None for a in answers):
                raise ConnectionError(f"{sum(a.ttft_s is None for a in answers)} requests to {name} were not answered")
            told[name] = [get_json(target, path) or {} for path in ("/laps_status", "/server_info")]
            ended = max(a.sent_s + (a.ttft_s or 0.0) for a in answers)
            return figures_of(jobs, [a.ttft_s or 0.0 for a in answers], ended, profile)

        seen = in_turns([v.name for v in found], args.rounds, once, say)
    expected = {v.name: [simulated(v.name, load, profile, rows[i], args.seed + i) for i in rows] for v in found}
    text = (
        f"{args.ranks} scheduler processes, {device.what}. {load.what}; {args.rate:g} requests/s of the unscaled "
        f"device, {args.rounds} rounds of {args.seconds:g} s."
    )
    data = {
        "groups": [rank["group"] for rank in told[LAPS][0].get("ranks", [])],
        "emulator": {
            name: [state.get("emulated") for state in info.get("internal_states", [])]
            for name, (_, info) in told.items()
        },
    }
    return piece_of(load, seen, expected, text, args.seed, data)


if __name__ == "__main__":
    sys.exit(main())
