"""The main job, seen: short turns and long documents through a real router, prefill and decode server, on this machine.

The same multi-turn load goes to a prefill server with LAPS and to a stock one with ``fcfs``, in turns (A B B A), both
in front of one decode server. What comes out: one table, one picture, ``piece.json``.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from laps_plan.pictures import distributions
from laps_plan.traffic.job import Job
from laps_plan.traffic.streams import in_turn

from benchmark.load import client
from benchmark.load.client import Answer
from benchmark.load.connection import Target, request
from benchmark.load.prompts import Prompts
from benchmark.results import (
    FAILED,
    KINDS,
    QUANTILES,
    Column,
    Command,
    Comparison,
    Parser,
    Piece,
    curve,
    positive,
    quantiles,
)
from benchmark.rig import model, servers
from benchmark.rig.devices import CPU, DEVICES
from benchmark.rig.fleet import Fleet
from benchmark.rig.variants import BUILT_IN, FCFS, LAPS

SESSIONS = 3
"""Users in a conversation at the same time."""
PACE_S = (0.4, 1.0)
"""Between a user's turns. They keep this pace whatever the answers take, so both variants are offered the same load;
only an answer that is not there yet delays the next turn."""
TURN_TOKENS, DOCUMENT_TOKENS = (10, 60), (1800, 2200)
ANSWER_TOKENS = 4
PICTURE = "ttft.png"
PATIENCE_S = 60.0
"""After the last request of a round; documents take a second each."""
NAMES = (LAPS, FCFS)
ORDER = (LAPS, FCFS, FCFS, LAPS)
"""Short rounds in turns: what else the machine does for half a minute meets both."""
DEVICE = replace(DEVICES[CPU], at_once=True)


COLUMNS = (
    *(Column(f"{kind} P{q}", (kind, f"p{q}_ms")) for kind in KINDS for q in QUANTILES),
    Column("requests/s", ("rps",), ".2f"), FAILED,
)  # fmt: skip


class Words:
    """Text of a wanted length in tokens, never the same twice."""

    def __init__(self, folder: Path, seed: int) -> None:
        from transformers import AutoTokenizer

        self._words = sorted({w for text in model.corpus() for w in text.split() if w.isalpha()})
        tokenizer = AutoTokenizer.from_pretrained(folder)
        sample = " ".join(self._words)
        self._per_word = len(tokenizer(sample)["input_ids"]) / len(self._words)
        self._rng = random.Random(seed)

    def said(self, role: str, tokens: int) -> dict[str, str]:
        """A message of about `tokens` tokens of words."""
        words = self._rng.choices(self._words, k=max(1, round(tokens / self._per_word)))
        return {"role": role, "content": " ".join(words)}


Messages = Sequence[dict[str, str]]


def chat(messages: Messages) -> bytes:
    """A chat completion, streamed."""
    body = {"model": "demo", "messages": messages, "max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True}
    return request({**body, "stream": True}, b"/v1/chat/completions")


def conversation(words: Words, user: int, rng: random.Random, span_s: float) -> Iterator[tuple[Job, Messages]]:
    """One user: short turns on a history that grows, a new conversation now and then.

    In the history stand answers made up here: the decode server's own are in no prefill server's cache either.
    """
    history: list[dict[str, str]] = []
    at_s = 0.0
    while (at_s := at_s + rng.uniform(*PACE_S)) < span_s:
        tokens = rng.randint(*TURN_TOKENS)
        asked = [*(history if len(history) < 16 else ()), words.said("user", tokens)]
        yield Job(at_s, tokens, stream=user, goes_on=True), asked
        history = [*asked, words.said("assistant", ANSWER_TOKENS)]


def documents(words: Words, rate: float, span_s: float, rng: random.Random) -> Iterator[tuple[Job, Messages]]:
    """Long documents, one at a random moment of each 1/`rate` seconds, `rate` times `span_s` in all.

    As many in every round, so a few dozen of them give a steady P90 where a Poisson process would not.
    """
    for i in range(max(1, round(span_s * rate))):
        tokens = rng.randint(*DOCUMENT_TOKENS)
        yield Job((i + rng.random()) / rate, tokens), [words.said("user", tokens)]


def one_round(target: Target, words: Words, seed: int, span_s: float, document_rate: float) -> list[Answer]:
    """The mixed load for `span_s` seconds."""
    rng = random.Random(seed)
    asked = [pair for i in range(SESSIONS) for pair in conversation(words, i, random.Random(rng.random()), span_s)]
    asked += documents(words, document_rate, span_s, rng)
    asked.sort(key=lambda pair: pair[0].at_s)
    bodies = [chat(messages) for _, messages in asked]
    return asyncio.run(client.replay(target, in_turn(job for job, _ in asked), bodies, PATIENCE_S))


def lone_long_s(target: Target, words: Words) -> float:
    """Median time to first token of one document on an idle server (seconds)."""
    tokens = [40] * 3 + [sum(DOCUMENT_TOKENS) // 2] * 3
    bodies = [chat([words.said("user", n)]) for n in tokens]
    return statistics.median(asyncio.run(client.one_by_one(target, bodies))[3:])


def require_answers(answers: Sequence[Answer], name: str, logs: Path) -> None:
    """Raise ServerError where a request has had no answer: who has waited so long would wait as long in every round."""
    hung = sum(a.error == client.UNANSWERED for a in answers)
    if hung:
        raise servers.ServerError(
            f"{hung} of {len(answers)} requests to {name} had no answer within {PATIENCE_S:.0f} s; the logs: {logs}"
        )


def summary(rounds: Sequence[Sequence[Answer]]) -> dict[str, Any]:
    """Quantiles over all requests of a variant's rounds."""
    seen = [a for answers in rounds for a in answers]
    failed = sum(a.ttft_s is None for a in seen)
    took_s = sum(max((a.sent_s + a.ttft_s for a in r if a.ttft_s is not None), default=0.0) for r in rounds)
    return {
        **{kind: quantiles(seen, kind) for kind in KINDS},
        "rps": round((len(seen) - failed) / max(took_s, 1e-9), 3),
        "failed": failed,
        "requests": {kind: sum(a.job.kind == kind for a in seen) for kind in KINDS},
    }


def options(p: Parser) -> None:
    """Add the options of this command."""
    p.add_argument("--utilisation", type=positive, default=0.4, help="of the prefill server by documents (0.4)")
    p.add_argument("--port", type=int, help="port of the first router, the second takes the next (default: free ones)")


def run(args: argparse.Namespace) -> Piece:
    """Run the rounds."""
    rounds: dict[str, list[list[Answer]]] = {name: [] for name in NAMES}
    order, say = ORDER * args.rounds, args.say
    for i, name in enumerate(NAMES if args.port else ()):
        servers.require_free(args.port + i, f"router ({name})")
    say("making the model")
    words = Words(DEVICE.checkpoint(), args.seed)
    prompts = Prompts(DEVICE.vocabulary, args.seed, DEVICE.longest, reuse=True, prefill_only=False)
    found = [BUILT_IN[name] for name in NAMES]
    with Fleet(DEVICE, found, prompts, args.out, say, True, True, args.port) as fleet:
        routers = {name: fleet.target(name) for name in NAMES}
        say("measuring a lone document")
        alone = [lone_long_s(target, words) for target in routers.values()]
        rate = args.utilisation / min(alone)
        for i, name in enumerate(order):
            say(f"round {i + 1} of {len(order)}, {name}")
            answers = one_round(routers[name], words, args.seed + i // 2, args.seconds, rate)
            require_answers(answers, name, fleet.log(name).parent)
            rounds[name].append(answers)
    seen = {name: [a for answers in of for a in answers] for name, of in rounds.items()}
    result = {name: summary(r) for name, r in rounds.items()}
    curves = {kind: {name: curve(answers, kind) for name, answers in seen.items()} for kind in KINDS}
    distributions(curves, "SGLang prefill with LAPS and with stock fcfs, the same load", args.out / PICTURE)
    table = Comparison({name: [one] for name, one in result.items()}).table("TTFT (ms)", "", COLUMNS, over=NAMES)
    load = {"documents_per_s": round(rate, 3), "users": SESSIONS, "seconds": args.seconds, "lone_long_s": alone}
    errors = sorted({a.error.splitlines()[0] for answers in seen.values() for a in answers if a.error})
    text = "The same load through a router, a prefill server with LAPS or stock fcfs, and a decode server, in turns."
    captions = {PICTURE: "Distribution of the time to first token; the dotted line is P90."}
    data = {"variants": result, "load": load, "errors": errors}
    return Piece("demo", "Short turns and long documents", text, args.seed, [table], [], captions, data)


def told(piece: Piece) -> int:
    """Print why requests failed; return 1 if any did."""
    for error in piece.data["errors"][:5]:
        print(f"demo: a request failed: {error}", file=sys.stderr)
    return 1 if any(v["failed"] for v in piece.data["variants"].values()) else 0


COMMAND = Command(
    "./run demo", __doc__, run, options, out="demo", rounds=2, seed=1, seconds=17.0, live=True, status=told
)

if __name__ == "__main__":
    sys.exit(COMMAND.main())
