"""Demo: short turns and long documents through a real router, prefill and decode server, on this machine.

A prefill server with LAPS and a stock one with ``fcfs`` get the same multi-turn load, in turns (A B B A). Both share
one decode server. The output: one table, one picture, ``piece.json``.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import starmap
from pathlib import Path

from laps_plan.pictures import distributions
from laps_plan.traffic.job import Job
from laps_plan.traffic.streams import chain_conversations

from benchmark.load import Answer, Prompts, client
from benchmark.results import FAILED, Column, Command, Comparison, Parser, Piece, positive, take_turns
from benchmark.results.metrics import KINDS, QUANTILES, brief, curve, ttft_paths
from benchmark.rig import BUILT_IN, CPU, DEVICES, FCFS, LAPS, Fleet, servers

SESSIONS = 3
"""Users at the same time, each in a conversation."""
PACE_S = (0.4, 1.0)
"""Time between a user's turns (seconds). Users do not wait for answers, so both variants get the same load."""
TURN_TOKENS, DOCUMENT_TOKENS = (10, 60), (1800, 2200)
TURNS, ANSWER_TOKENS = 8, 4
PICTURE = "ttft.png"
PATIENCE_S = 60.0
"""Longest wait for answers after the last request of a round (seconds). A document takes a second."""
NAMES = (LAPS, FCFS)
"""Variants. Their rounds are short, so that half a minute of other work on the machine disturbs both."""
DEVICE = replace(DEVICES[CPU], at_once=True)
COLUMNS = (*starmap(Column, ttft_paths(*QUANTILES).items()), Column("requests/s", ("rps",), ".2f"), FAILED)


def turns(user: int, rng: random.Random, span_s: float) -> Iterator[Job]:
    """Yield the short turns of one user, whose history grows. A new conversation starts after TURNS turns."""
    at_s, history, n = 0.0, 0, 0
    while (at_s := at_s + rng.uniform(*PACE_S)) < span_s:
        history, tokens = history if n % TURNS else 0, rng.randint(*TURN_TOKENS)
        yield Job(at_s, tokens, history, 1 + user + SESSIONS * (n // TURNS), continues_stream=True)
        history, n = history + tokens, n + 1


def documents(rate: float, span_s: float, rng: random.Random) -> Iterator[Job]:
    """Yield long documents: one at a random time of each interval of 1/`rate` seconds, `rate` times `span_s` in total.

    Every round has the same number, so that a few dozen documents give a steady P90. With Poisson times they would not.
    """
    for i in range(max(1, round(span_s * rate))):
        yield Job((i + rng.random()) / rate, rng.randint(*DOCUMENT_TOKENS))


def jobs(seed: int, span_s: float, document_rate: float) -> list[Job]:
    rng = random.Random(seed)
    users = [job for user in range(SESSIONS) for job in turns(user, random.Random(rng.random()), span_s)]
    return chain_conversations([*users, *documents(document_rate, span_s, rng)])


def require_answers(answers: Sequence[Answer], name: str, logs: Path) -> None:
    """Raise ServerError if a request got no answer, because every further round would hang as long."""
    hung = sum(a.error == client.UNANSWERED for a in answers)
    if hung:
        raise servers.ServerError(
            f"{hung} of {len(answers)} requests to {name} had no answer within {PATIENCE_S:.0f} s; the logs: {logs}"
        )


def options(p: Parser) -> None:
    p.add_argument(
        "--utilisation", type=positive, default=0.4, help="prefill server's share of time for documents (0.4)"
    )


def run(args: argparse.Namespace) -> Piece:
    def prompts(seed: int) -> Prompts:
        return Prompts(DEVICE.vocabulary, seed, DEVICE.longest, reuse=True, prefill_only=False, answer=ANSWER_TOKENS)

    found = [BUILT_IN[name] for name in NAMES]
    with Fleet(DEVICE, found, prompts(args.seed), args.out, args.say, pd=True, together=True) as fleet:
        args.say("measuring a lone document")
        lone = prompts(args.seed).bodies([Job(0.0, sum(DOCUMENT_TOKENS) // 2)] * 4, args.seed)
        took = [asyncio.run(client.one_by_one(fleet.target(name), lone))[1:] for name in NAMES]
        rate = args.utilisation / min(map(statistics.median, took))

        def once(i: int, name: str) -> list[Answer]:
            # Both variants get the same prompts, which no earlier round had.
            load = jobs(args.seed + i, args.seconds, rate)
            bodies = prompts(1000 * args.seed + i).bodies(load, 1000 * args.seed + i)
            answers = asyncio.run(client.replay(fleet.target(name), load, bodies, PATIENCE_S))
            require_answers(answers, name, fleet.log(name).parent)
            return answers

        rounds = take_turns(NAMES, 2 * args.rounds, once, args.say)
    seen = {name: [a for answers in of for a in answers] for name, of in rounds.items()}
    result = {}
    for name, of in rounds.items():
        ended_s = sum(max((a.sent_s + (a.ttft_s or 0.0) for a in answers), default=0.0) for answers in of)
        answered = sum(a.ttft_s is not None for a in seen[name])
        result[name] = {**brief(seen[name]), "rps": answered / max(ended_s, 1e-9)}
    curves = {kind: {name: curve(answers, kind) for name, answers in seen.items()} for kind in KINDS}
    distributions(curves, "SGLang prefill with LAPS and with stock fcfs, the same load", args.out / PICTURE)
    table = Comparison({name: [one] for name, one in result.items()}).table("TTFT (ms)", "", COLUMNS, over=NAMES)
    errors = sorted({a.error.splitlines()[0] for answers in seen.values() for a in answers if a.error})
    text = "The same load through a router, a prefill server with LAPS or stock fcfs, and a decode server, in turns."
    captions = {PICTURE: "Distribution of the time to first token; the dotted line is P90."}
    data = {"variants": result, "errors": errors, "documents_per_s": rate, "seconds": args.seconds}
    return Piece("demo", "Short turns and long documents", text, args.seed, [table], [], captions, data)


def exit_code(piece: Piece) -> int:
    """Print errors of failed requests; return 1 if a request failed, else 0."""
    for error in piece.data["errors"][:5]:
        print(f"demo: a request failed: {error}", file=sys.stderr)
    return 1 if any(v["failed"] for v in piece.data["variants"].values()) else 0


COMMAND = Command(
    "./run demo", __doc__, run, options, out="demo", rounds=2, seed=1, seconds=17.0, live=True, status=exit_code
)

if __name__ == "__main__":
    sys.exit(COMMAND.main())
