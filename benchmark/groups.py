"""Data-parallel attention ranks that plan together, against SGLang's policies on each rank: real schedulers, emulated.

    ./run bench groups [--ranks 4] [--slow 20] [--rate 110] [--rounds 3] [--seconds 60]

A prefill server with one scheduler process per rank, on an emulated group of eight H200 with DeepSeek-V3. The load: 95%
LMSYS lengths up to 256 tokens and 5% of 1,024 to 8,192, at a rate given for the unscaled device. The servers run in
turns; all send requests to the rank with the fewest tokens in flight.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace

from laps_plan.profile import Profile
from laps_plan.traffic.job import Job

from benchmark.emulated import arrivals
from benchmark.load import client
from benchmark.load.prompts import Prompts
from benchmark.results.metrics import quantile
from benchmark.results.piece import Figure, Piece, Table, parser, positive
from benchmark.results.rounds import in_turns, ratio
from benchmark.rig import architectures, devices
from benchmark.rig.fleet import Fleet, command_line, get_json
from benchmark.rig.progress import Progress
from benchmark.rig.variants import LAPS, ON, SPF, Variant

PROFILE, MODEL = "h200-deepseek-v3-dp8", "deepseek3"
CHUNK = 8192
"""Most new tokens of a rank's batch."""
STOCK_CHUNK = 2048
"""New tokens of a stock rank's batch: the better chunk for the load (512 to 8,192 simulated)."""
SHORT, LONGEST = 256, 8192
PATIENCE_S = 120.0
KEYS = ("short P90", "mean", "mean slowdown", "long P90")


def variants(ranks: int) -> list[Variant]:
    """Return stock's best policy for this load, and LAPS. SGLang divides the chunk by the number of ranks."""
    group = (
        *("--tp-size", str(ranks), "--dp-size", str(ranks), "--enable-dp-attention"),
        *("--load-balance-method", "total_tokens", "--disable-overlap-schedule"),
        # SGLang keeps memory for a chunk that this machine does not have, though nothing as large runs.
        *("--mem-fraction-static", "0.5"),
    )
    chunks = {SPF: STOCK_CHUNK, LAPS: CHUNK}
    own = {SPF: ("--schedule-policy", SPF), LAPS: (ON,)}
    return [Variant(n, (*group, *own[n], "--chunked-prefill-size", str(ranks * chunks[n]))) for n in chunks]


def figures_of(tokens: Sequence[int], ttfts: Sequence[float], profile: Profile) -> dict[str, float]:
    """Return the figures of one round of one server (seconds)."""
    short = [t for n, t in zip(tokens, ttfts, strict=True) if n <= SHORT]
    long = [t for n, t in zip(tokens, ttfts, strict=True) if n > SHORT]
    group = profile.group
    assert group is not None
    slowdowns = [t / group.lone_s(n, 0, CHUNK) for n, t in zip(tokens, ttfts, strict=True)]
    found = quantile(short, 90), statistics.fmean(ttfts), statistics.fmean(slowdowns), quantile(long, 90)
    return dict(zip(KEYS, found, strict=True))


def main(argv: Sequence[str] | None = None) -> int:
    p = parser("./run bench groups", __doc__, "groups", rounds="(3)", seed=1, seconds=60.0)
    p.add_argument("--ranks", type=int, default=4, help="data-parallel attention ranks (4)")
    p.add_argument("--slow", type=positive, default=20.0, help="slowdown of the emulated device (20)")
    p.add_argument("--rate", type=positive, default=110.0, help="requests/s of the unscaled device (110)")
    args = p.parse_args(argv)
    with command_line("bench groups"):
        piece = run(args)
    piece.leave(args.out, "benchmark.groups", argv)
    return 0


def run(args: argparse.Namespace) -> Piece:
    """Run all rounds, the servers in turns."""
    say = Progress()
    profile = Profile.load(PROFILE).with_ranks(args.ranks).stretched(args.slow)
    made = devices.emulated(f"{PROFILE},slow={args.slow:g}")
    # SGLang needs a core for each rank, out of those that it may use.
    usable = sorted(os.sched_getaffinity(0))
    cores = "|".join(str(usable[i % len(usable)]) for i in range(args.ranks))
    device = replace(
        made,
        env={**made.env, "SGLANG_CPU_OMP_THREADS_BIND": cores},
        checkpoint=lambda: architectures.make(devices.MODELS, MODEL),
        start_s=600.0,
    )
    prompts = Prompts(device.vocabulary, args.seed, LONGEST, reuse=False, prefill_only=True)
    found = variants(args.ranks)
    rows: dict[int, list[Job]] = {
        i: arrivals(args.rate / args.slow, args.seconds, f"{args.seed}/{i}") for i in range(args.rounds)
    }

    # One server at a time: each has as many schedulers as there are ranks.
    with Fleet(device, CHUNK, found, False, args.out, prompts, say, together=False) as fleet:

        def once(i: int, name: str) -> dict[str, float]:
            bodies = prompts.bodies(rows[i], args.seed + i)
            answers = asyncio.run(client.replay(fleet.target(name), rows[i], bodies, PATIENCE_S))
            if any(a.ttft_s is None for a in answers):
                raise ConnectionError(f"{sum(a.ttft_s is None for a in answers)} requests to {name} were not answered")
            ended = max(a.sent_s + (a.ttft_s or 0.0) for a in answers)
            own = figures_of([job.new for job in rows[i]], [a.ttft_s or 0.0 for a in answers], profile)
            return {**own, "tokens/s": sum(job.new for job in rows[i]) / ended}

        seen = in_turns([v.name for v in found], args.rounds, once, say)
        told = get_json(fleet.target(LAPS), "/laps_status") or {}
    table = [
        (name, *(f"{statistics.median(one[key] for one in rounds):.3g}" for key in (*KEYS, "tokens/s")))
        for name, rounds in seen.items()
    ]
    of = [
        Figure.of(f"{key}, {LAPS} / {SPF}", ratio([one[key] for one in seen[LAPS]], [one[key] for one in seen[SPF]]))
        for key in (*KEYS, "tokens/s")
    ]
    text = f"{args.ranks} scheduler processes, {device.what}; {args.rate:g} requests/s of it, {args.rounds} rounds."
    head = ("variant", *KEYS, "tokens/s")
    note = f"Seconds of the stretched device; short: up to {SHORT} tokens."
    return Piece(
        "groups",
        "Groups of ranks",
        text,
        args.seed,
        [Table("Groups", head, table, note)],
        of,
        data={"seen": seen, "groups": [rank["group"] for rank in told["ranks"]]},
    )


if __name__ == "__main__":
    sys.exit(main())
