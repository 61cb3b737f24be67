"""Faults of every kind while mixed load runs through real routers to real servers; every request must end once.

    ./run bench faults                                   # 10,000 requests
    ./run bench faults --requests 1000 --seconds 120     # a short one
    ./run bench faults --only kill                       # one class of faults or of clients

Two prefill servers, two decode servers (one where memory is short) and two routers, on loopback. Exit code 1 where a
bar is missed; the raw data is in out/faults.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import signal
import sys
import time
from collections.abc import Sequence

from benchmark.results.command import count, one_line_errors, parser, positive
from benchmark.results.piece import Piece
from benchmark.rig.progress import Progress
from faults import clients, comparison, corpus, logs, outcome, prompts, schedule
from faults.actions import CLIENTS, Clients
from faults.evidence import Evidence
from faults.fleet import REST_S, Fleet
from faults.inflict import Inflictor
from faults.oracle import BAD, Oracle, RequestRecord
from faults.schedule import DECODE, HOSTILE, LANES, PREFILL

SHORT_PROMPTS, LONG_PROMPTS = 120, 30
LEAST_CASES = 220
"""Cases of the corpus in a short campaign; a long one sends all."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a campaign; return 0 if every bar is met."""
    p = parser("./run bench faults", __doc__, "faults", seed=1)
    p.add_argument("--requests", type=count, default=10_000, help="end after this many (10000)")
    p.add_argument("--seconds", type=positive, default=2700.0, help="most seconds of load (2700)")
    p.add_argument("--only", choices=schedule.KINDS, help="one class, beside plain requests")
    args = p.parse_args(argv)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, _interrupt)
    say = Progress(live=True)
    evidence = Evidence()
    with one_line_errors("bench faults"):
        say("making the model")
        try:
            with Fleet(args.out, evidence, args.seed, say) as fleet:
                piece = asyncio.run(_run_campaign(fleet, args, say))
        finally:
            say.done()
    piece.save_and_print(args.out, "./run bench faults", argv, every=True)
    for line in outcome.describe_failures(piece):
        print(line, file=sys.stderr)
    missed = [f"{f.name}: {f.value:.0f}" for f in piece.figures if f.met is False]
    if missed:
        print(f"bench faults: {'; '.join(missed)}", file=sys.stderr)
    return 1 if missed else 0


def _interrupt(*_: object) -> None:
    """Turn the first SIGTERM into a KeyboardInterrupt and ignore later ones, so that the campaign cleans up."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.kill(os.getpid(), signal.SIGINT)


async def _run_campaign(fleet: Fleet, args: argparse.Namespace, say: Progress) -> Piece:
    say("starting the routers")
    try:
        await fleet.open()
        all_prompts = prompts.make(args.seed, SHORT_PROMPTS, LONG_PROMPTS)
        say("asking for the right answers")
        answers = await clients.collect_right_answers(fleet.port, all_prompts)
        oracle = Oracle(fleet.evidence, {role: [m.name for m in fleet.with_role(role)] for role in (PREFILL, DECODE)})
        inflictor = Inflictor(fleet)
        numbers = itertools.count(1)
        ports = [router.port for router in fleet.routers]
        groups = [Clients(ports[i:] + ports[:i], all_prompts, answers, oracle, numbers) for i in range(len(ports))]
        seconds = await _run_load(fleet, groups, inflictor, args, say)
        return await _check_recovery(fleet, inflictor, groups, seconds, args, say)
    finally:
        await fleet.close()


async def _run_load(
    fleet: Fleet, groups: Sequence[Clients], inflictor: Inflictor, args: argparse.Namespace, say: Progress
) -> float:
    """Inflict faults while requests run, until enough have ended and every fault has happened. Returns the time taken
    (seconds)."""
    oracle = groups[0].oracle
    begin, ends = time.monotonic(), oracle.ends
    crashed = False

    def over() -> bool:
        enough = len(ends) >= args.requests and schedule.all_faults_inflicted(inflictor.done, args.only)
        # Failures after a crash are only its consequences.
        return crashed or enough or time.monotonic() - begin > args.seconds

    async def watch() -> None:
        nonlocal crashed
        while True:
            bad = sum(oracle.total(end) for end in BAD)
            now = ", ".join(inflictor.now.values()) or "no fault"
            say(f"{len(ends)} of {args.requests} requests, {bad} failed; {now}")
            crashed = crashed or bool(fleet.find_dead_processes())
            await asyncio.sleep(1.0)

    lanes = [asyncio.ensure_future(inflictor.lane(schedule.faults(args.seed, lane, args.only))) for lane in LANES]
    watcher = asyncio.ensure_future(watch())
    try:
        work = schedule.actions(args.seed, args.only)
        await asyncio.gather(*(group.run(work, over) for group in groups))
        took_s = time.monotonic() - begin
        inflictor.end()
        if fleet.find_dead_processes():
            for lane in lanes:
                lane.cancel()
        ended = await asyncio.gather(*lanes, return_exceptions=True)
    finally:
        for task in (*lanes, watcher):
            task.cancel()
    inflictor.wrong += [f"{type(e).__name__}: {e}" for e in ended if isinstance(e, Exception)]
    return took_s


async def _check_recovery(
    fleet: Fleet,
    inflictor: Inflictor,
    groups: Sequence[Clients],
    seconds: float,
    args: argparse.Namespace,
    say: Progress,
) -> Piece:
    """Check that everything has recovered, send hostile requests, check for leftovers, and send the hostile requests to
    stock MiniLB, except deadly ones."""
    dead, oracle = fleet.find_dead_processes(), groups[0].oracle
    unhealthy = await fleet.find_unhealthy(0.0 if dead else 30.0)
    cases = comparison.choose_cases(corpus.CASES, max(LEAST_CASES, args.requests // 10), args.seed)
    if dead or args.only not in (None, HOSTILE):
        cases = []
    ours = await comparison.send_cases(fleet.port, cases, say, lambda: not fleet.find_dead_processes(), marked=True)
    suspects = ", ".join(comparison.last_sent(cases, ours))
    dead = dead or [f"{x}; it was sent one of: {suspects}" for x in fleet.find_dead_processes()]
    say("waiting for rest")
    await asyncio.gather(*(group.finish() for group in groups))
    left = await fleet.wait_for_rest(0.0 if dead else REST_S)
    dead = dead or fleet.find_dead_processes()
    found = logs.scan(sorted(fleet.logs.glob("*.log")))
    stock: dict[str, RequestRecord] = {}
    if cases and not dead:
        for_stock = [c for c in cases if not c.deadly]
        router = await fleet.start_stock_router()
        try:
            stock = await comparison.send_cases(
                router.port, for_stock, say, lambda: not fleet.find_dead_processes(), marked=False
            )
        finally:
            router.kill()
    return outcome.make_piece(
        oracle,
        comparison.compare(cases, ours, stock),
        seed=args.seed,
        seconds=seconds,
        inflicted=inflictor.done,
        wrong={
            "places, leases, tasks, descriptors and KV left": left,
            "processes that ended and were not killed": dead,
            "tracebacks and alarms in logs": found.wrong,
            "faults that were not recovered from": [
                *inflictor.wrong, *(f"a router calls {name} unhealthy" for name in unhealthy)
            ],
            "hostile requests answered 5xx of its own making": comparison.find_own_errors(ours, fleet.evidence),
        },
        own_logs=found.own,
        sent=len(cases),
        settings={
            "requests": args.requests, "seconds": args.seconds, "only": args.only, "clients": CLIENTS,
            "servers": [m.name for m in fleet.members], "prompts": [SHORT_PROMPTS, LONG_PROMPTS],
        },
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
