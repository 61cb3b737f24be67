"""This client compared with NVIDIA's aiperf: one trace in Mooncake's format through router, prefill and decode servers.

    AIPERF=/path/to/aiperf python -m benchmark.aiperf [--rounds 5] [--endpoint chat] [--out out/aiperf]

aiperf makes the prompts from the trace in a first run. The requests that it sent are then sent by this client at the
times of the trace, in turns with aiperf itself, each time to servers with empty prefix caches.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shutil
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from laps_plan.traffic.job import Job
from laps_plan.traffic.named import Offer, Scale, make

from benchmark.load import aiperf, client
from benchmark.load.connection import Target, request
from benchmark.load.prompts import Prompts
from benchmark.results.bars import SAME_CLIENT
from benchmark.results.metrics import mean, quantile
from benchmark.results.piece import Figure, Piece, Table, parser
from benchmark.results.rounds import in_turns, ratio
from benchmark.rig import servers
from benchmark.rig.devices import CPU, DEVICES
from benchmark.rig.fleet import command_line, flush, warm_up
from benchmark.rig.progress import Progress
from benchmark.rig.variants import BUILT_IN
from benchmark.rig.variants import LAPS as LAPS_PREFILL
from benchmark.suites.router import FLAGS, LAPS, MODULES
from benchmark.suites.serve.compare import lone_ttft

OURS, THEIRS = "this client", "aiperf"
PREFILLS = 2
WORKLOAD, LONGEST, ANSWER_TOKENS = "azure", 1024, 4
SYSTEM_PROMPTS, SYSTEM_TOKENS = 4, 4 * aiperf.BLOCK
"""Each request begins with one of them, which exercises a trace's hash ids."""
PATIENCE_S = 60.0
DEVICE = DEVICES[CPU]
Seen = dict[str, list[dict[str, float]]]


@contextmanager
def fleet(out: Path, say: Callable[[str], None]) -> Iterator[tuple[Target, Path]]:
    """Run the router in front of prefill servers with LAPS and one decode server; yield its address and the model's
    folder."""
    folder, logs = DEVICE.checkpoint(), out / "logs"
    flags = ("--chunked-prefill-size", str(DEVICE.chunk), *DEVICE.args)
    laps = (*flags, *BUILT_IN[LAPS_PREFILL].args)
    prefills = [
        servers.prefill(folder, logs / f"prefill{i}.log", *laps, env=DEVICE.env, name=f"prefill server {i}")
        for i in range(PREFILLS)
    ]
    decode = servers.decode(folder, logs / "decode.log", *flags, env=DEVICE.env)
    router = servers.minilb(prefills, [decode], logs / "router.log", *FLAGS[LAPS], module=MODULES[LAPS])
    say("starting the servers")
    # The router starts last: it would find servers that are still starting unhealthy for a while.
    with servers.running(*prefills, decode), servers.running(router):
        yield Target(servers.HOST, router.port), folder


def jobs_of(lone: Callable[[int], float], utilisation: float, span_s: float, seed: int) -> list[Job]:
    """Return rows of the Azure trace behind system prompts: new tokens for ``utilisation`` of one server's time."""
    workload, rng = make(WORKLOAD, Scale(LONGEST, LONGEST)), random.Random(seed)
    alone_s = mean([lone(job.new) for job in workload.sample(1000, rng)])
    rows = workload.arrivals(Offer(utilisation, span_s, 1.0 / alone_s, lone), rng)
    # The first one is due at once, as in aiperf.
    begin_s = rows[0].at_s
    return [
        replace(job, at_s=job.at_s - begin_s, cached=SYSTEM_TOKENS, stream=rng.randrange(SYSTEM_PROMPTS))
        for job in rows
    ]


def replayed(target: Target, jobs: Sequence[Job], sent: Sequence[aiperf.Sent], path: str) -> dict[str, float]:
    """Return TTFTs of our client for the requests that aiperf sent. Raises ConnectionError if one fails."""
    bodies = [request(one.payload, path.encode()) for one in sent]
    answers = asyncio.run(client.replay(target, jobs, bodies, PATIENCE_S))
    wrong = [a.error for a in answers if a.error]
    if wrong:
        raise ConnectionError(f"{len(wrong)} of {len(jobs)} requests failed: {wrong[0].splitlines()[0]}")
    ttft = [1e3 * a.ttft_s for a in answers if a.ttft_s is not None]
    return {"p50": quantile(ttft, 50), "p90": quantile(ttft, 90), "avg": mean(ttft)}


def main(argv: Sequence[str] | None = None) -> int:
    p = parser("python -m benchmark.aiperf", __doc__, "aiperf", rounds="(5)", seed=1, whole=True)
    p.add_argument("--seconds", type=float, default=10.0, help="length of the trace (10)")
    p.add_argument("--utilisation", type=float, default=0.3, help="load of one prefill server by the trace (0.3)")
    p.add_argument("--endpoint", choices=tuple(aiperf.ENDPOINTS), default="completions", help="route (completions)")
    args = p.parse_args(argv)
    if args.rounds < 1 or args.seconds <= 0 or not 0 < args.utilisation <= 1:
        p.exit(2, f"{p.prog}: --rounds and --seconds are positive, --utilisation lies in (0, 1]\n")
    with command_line("benchmark.aiperf"):
        piece = run(args, aiperf.found())
    piece.leave(args.out, "benchmark.aiperf", argv, every=True)
    return 0


def run(args: argparse.Namespace, program: str) -> Piece:
    """Run all rounds. Raises ServerError or ConnectionError."""
    say, trace, cache = Progress(), args.out / "trace.jsonl", args.out / "hub"
    prompts = Prompts(DEVICE.vocabulary, args.seed, LONGEST, reuse=False, prefill_only=False, answer=ANSWER_TOKENS)
    with fleet(args.out, say) as (target, folder):
        say("measuring lone prefills")
        warm_up(target, prompts, LONGEST)
        jobs = jobs_of(lone_ttft(target, prompts, LONGEST, repeats=2), args.utilisation, args.seconds, args.seed)
        aiperf.write(aiperf.trace(jobs, ANSWER_TOKENS), trace)
        aiperf.hub(folder, cache)

        def theirs(name: str, *, raw: bool) -> Path:
            artifacts: Path = args.out / "artifacts" / name
            shutil.rmtree(artifacts, ignore_errors=True)
            line = aiperf.command(program, target.url, args.endpoint, trace, artifacts, args.seed, raw=raw)
            aiperf.run(line, args.out / "logs" / f"aiperf-{name}.log", cache, args.seconds + aiperf.LIMIT_S)
            return artifacts

        say("aiperf makes the prompts")
        first = theirs("first", raw=True)
        sent, version = aiperf.sent(first), aiperf.summary(first).version
        if [one.number for one in sent] != list(range(len(jobs))):
            raise ConnectionError(f"aiperf sent {len(sent)} requests of a trace of {len(jobs)}")

        def once(i: int, name: str) -> dict[str, float]:
            flush(target)
            if name == OURS:
                return replayed(target, jobs, sent, aiperf.ENDPOINTS[args.endpoint])
            summary = aiperf.summary(theirs(f"round{i}", raw=False))
            if summary.answered != len(jobs):
                raise ConnectionError(f"{len(jobs) - summary.answered} of {len(jobs)} requests of aiperf's failed")
            return {"p50": summary.p50, "p90": summary.p90, "avg": summary.avg}

        seen = in_turns((OURS, THEIRS), args.rounds, once, say)
    return piece_of(seen, jobs, version, args)


def piece_of(seen: Seen, jobs: Sequence[Job], version: str, args: argparse.Namespace) -> Piece:
    """Return the piece for the report."""
    of = {name: {key: [r[key] for r in rounds] for key in rounds[0]} for name, rounds in seen.items()}
    figures = [
        Figure.of(f"{what} TTFT, {OURS} / {THEIRS}", ratio(of[OURS][key], of[THEIRS][key]), bar)
        for what, key, bar in (("median", "p50", SAME_CLIENT), ("P90", "p90", None), ("mean", "avg", None))
    ]
    rows = [
        (name, *(f"{v:.1f}" for v in by["p50"]), *(f"{statistics.median(by[k]):.1f}" for k in ("p90", "avg")))
        for name, by in of.items()
    ]
    heads = ("client", *(f"P50, round {i + 1}" for i in range(args.rounds)), "P90", "mean")
    note = "TTFT in ms. P90 and mean: medians over the rounds. aiperf counts to the first event that has a text."
    data: dict[str, Any] = {
        "ttft_ms": seen,
        "aiperf": version,
        "endpoint": aiperf.ENDPOINTS[args.endpoint],
        "requests": len(jobs),
        "new_tokens": [job.new for job in jobs],
        "cached_tokens": [job.cached for job in jobs],
    }
    return Piece(
        name="aiperf",
        title="The client against aiperf",
        text=f"{len(jobs)} requests of a trace in Mooncake's format (Azure's lengths and times, scaled, behind "
        f"{SYSTEM_PROMPTS} system prompts) in {args.seconds:g} s, streamed through the router, {PREFILLS} prefill "
        "servers with LAPS and a decode server: replayed by aiperf, and the same requests by this client, in turns.",
        seed=args.seed,
        tables=[Table("TTFT as each client sees it", heads, rows, note)],
        figures=figures,
        data=data,
    )


if __name__ == "__main__":
    sys.exit(main())
