"""Faults of every kind while mixed load runs through a real router to real servers; every request must end once.

    ./run bench faults                                   # 10,000 requests
    ./run bench faults --requests 1000 --seconds 120     # a short one
    ./run bench faults --only kill                       # one class of faults or of clients

Two prefill servers, two decode servers (one where memory is short) and the router, on loopback. Exit code 1 where a bar
is missed; everything raw is in out/faults.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmark.faults import baseline, comparison, corpus, load, logs, prompts, rest, schedule
from benchmark.faults.deeds import Crowd
from benchmark.faults.evidence import Evidence
from benchmark.faults.fleet import Fleet
from benchmark.faults.inflict import Inflictor
from benchmark.faults.oracle import BAD, Oracle
from benchmark.faults.outcome import Campaign
from benchmark.faults.schedule import DECODE, HOSTILE, LANES, PREFILL
from benchmark.results.piece import command
from benchmark.rig import model
from benchmark.rig.fleet import one_line_errors
from benchmark.rig.progress import Progress

SHORT_PROMPTS, LONG_PROMPTS = 120, 30
LEAST_CASES = 220
"""Of the corpus, in a short campaign; a long one sends all."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a campaign; 0 if every bar is met."""
    parser = argparse.ArgumentParser(
        prog="./run bench faults", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=10_000, help="end after so many (10000)")
    parser.add_argument("--seconds", type=float, default=2700.0, help="of load at most (2700)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=schedule.CLASSES, help="one class, beside plain requests")
    parser.add_argument("--out", type=Path, default=model.REPO / "out" / "faults")
    args = parser.parse_args(argv)
    if args.requests < 1 or args.seconds <= 0:
        parser.exit(2, f"{parser.prog}: --requests and --seconds are positive\n")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, _interrupt)
    say = Progress(live=True)
    evidence = Evidence()
    with one_line_errors("bench faults"):
        say("making the model")
        try:
            with Fleet(args.out, evidence, args.seed, say) as fleet:
                found = asyncio.run(_campaign(fleet, args, say))
        except baseline.Unsteady as e:
            print(f"bench faults: {e}", file=sys.stderr)
            return 1
        finally:
            say.done()
    piece = found.piece()
    piece.command = command("benchmark.faults", argv)
    print(piece.tables[0])
    for figure in piece.figures:
        print(figure)
    for line in found.complaints():
        print(line, file=sys.stderr)
    print(piece.write(args.out))
    missed = [f"{f.name}: {f.value:.0f}" for f in piece.figures if f.met is False]
    if missed:
        print(f"bench faults: {'; '.join(missed)}", file=sys.stderr)
    return 1 if missed else 0


def _interrupt(*_: object) -> None:
    """Ended by its keeper it ends as if interrupted once, however often it is told: nothing is left behind."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.kill(os.getpid(), signal.SIGINT)


async def _campaign(fleet: Fleet, args: argparse.Namespace, say: Progress) -> Campaign:
    say("starting the router")
    try:
        await fleet.open()
        return await _through(fleet, args, say)
    finally:
        await fleet.close()


async def _through(fleet: Fleet, args: argparse.Namespace, say: Progress) -> Campaign:
    evidence = fleet.evidence
    asked = prompts.make(args.seed, SHORT_PROMPTS, LONG_PROMPTS)
    say("asking for the right answers")
    answers = await baseline.answers(fleet.port, asked)
    oracle = Oracle(evidence, {role: [m.name for m in fleet.of(role)] for role in (PREFILL, DECODE)})
    inflictor = Inflictor(fleet)
    crowd = Crowd(fleet.port, asked, answers, oracle)
    span = load.Span(args.requests, args.seconds, lambda: schedule.covered(inflictor.done, args.only))

    async def watch() -> None:
        while True:
            bad = sum(oracle.total(end) for end in BAD)
            now = ", ".join(inflictor.now.values()) or "no fault"
            say(f"{len(oracle.ends)} of {args.requests} requests, {bad} failed; {now}")
            # What comes after a crash would only be its echo.
            span.over = span.over or bool(fleet.dead())
            await asyncio.sleep(1.0)

    lanes = [asyncio.ensure_future(inflictor.lane(schedule.faults(args.seed, lane, args.only))) for lane in LANES]
    watcher = asyncio.ensure_future(watch())
    try:
        await load.run(crowd, schedule.deeds(args.seed, args.only), oracle, span)
        if not (dead := fleet.dead()):
            inflictor.end()
        else:
            for lane in lanes:
                lane.cancel()
        ended = await asyncio.gather(*lanes, return_exceptions=True)
    finally:
        for task in (*lanes, watcher):
            task.cancel()
        await crowd.close()
    dead = dead or fleet.dead()
    inflictor.wrong += [f"{type(e).__name__}: {e}" for e in ended if isinstance(e, Exception)]
    inflictor.wrong += [f"the router calls {name} unhealthy" for name in await fleet.healthy(0.0 if dead else 30.0)]
    cases = comparison.choose(corpus.CASES, max(LEAST_CASES, args.requests // 10), args.seed)
    if dead or args.only not in (None, HOSTILE):
        cases = []
    ours = await comparison.run(fleet.port, cases, say, lambda: not fleet.dead(), marked=True)
    dead += [
        f"{x}; it was sent one of: {', '.join(comparison.last_sent(cases, ours))}" for x in fleet.dead() if not dead
    ]
    say("waiting for rest")
    left = await rest.at_rest(fleet, 0.0 if dead else rest.LIMIT_S)
    dead = dead or fleet.dead()
    found = logs.scan(fleet.logs())
    stock: dict[str, corpus.Outcome | None] = {}
    if cases and not dead:
        for_stock = [c for c in cases if not c.deadly]
        router = await fleet.stock()
        with contextlib.ExitStack() as stack:
            stack.callback(router.kill)
            got = await comparison.run(router.port, for_stock, say, lambda: not fleet.dead(), marked=False)
        stock = dict(zip((c.name for c in for_stock), got, strict=True))
    return Campaign(
        oracle=oracle,
        seed=args.seed,
        seconds=span.took_s,
        inflicted=inflictor.done,
        rest=left,
        dead=dead,
        logs=found.wrong,
        own_logs=found.own,
        recovery=inflictor.wrong,
        own_errors=comparison.own_errors(cases, ours, evidence),
        compared=comparison.compare(cases, ours, stock),
        sent=len(cases),
        settings={
            "requests": args.requests, "seconds": args.seconds, "only": args.only, "clients": load.CLIENTS,
            "servers": [m.name for m in fleet.members], "prompts": [SHORT_PROMPTS, LONG_PROMPTS],
        },
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
