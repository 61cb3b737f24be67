"""TTFT of clients behind each router, with the same prefill servers and the same arrivals in each round: chats among
documents."""

from __future__ import annotations

import asyncio
import os
import random
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from laps_plan.traffic.job import LONG, SHORT, Job
from laps_plan.traffic.streams import chain_conversations, poisson

from benchmark.load import Prompts, client
from benchmark.results import FAILED, Comparison, Namespace, Piece, bars, brief, take_turns
from benchmark.rig import CPU, FCFS, MODELS, Device, model
from benchmark.rig import LAPS as LAPS_PREFILL
from benchmark.router import ALL, LAPS, STOCK, TTFT, best_other, site

TWO = 2
SYSTEM_TOKENS, SYSTEMS = 400, 3
"""System prompts shared by many conversations: tokens of each (more than a short request has), and their number."""
TURNS, TURN_TOKENS, PAUSE_S = 6, (20, 150), 1.0
"""Turns of a conversation, new tokens of each, mean pause of the user between them (seconds)."""
DOCUMENT_TOKENS = (3000, 6000)
LONGEST = max(DOCUMENT_TOKENS[1], SYSTEM_TOKENS + TURNS * TURN_TOKENS[1])
ANSWER_TOKENS = 4
TURNS_PER_S = 4.0
LONG_LOAD = 0.4
"""Share of all prefill servers' time that the documents take."""


def arrivals(seconds: float, documents_per_s: float, rng: random.Random) -> list[Job]:
    """Return jobs: conversations, each a stream that starts with a shared system prompt, and entirely new documents."""
    jobs = [Job(at_s, rng.randint(*DOCUMENT_TOKENS)) for at_s in poisson(documents_per_s, seconds, rng)]
    for number, begin_s in enumerate(poisson(TURNS_PER_S / TURNS, seconds, rng)):
        at_s, history = begin_s, SYSTEM_TOKENS
        for _ in range(TURNS):
            new = rng.randint(*TURN_TOKENS)
            jobs.append(Job(at_s, new, history, 1 + number, continues_stream=True))
            history += new
            at_s += rng.expovariate(1 / PAUSE_S)
    return chain_conversations(job for job in jobs if job.at_s < seconds)


def bodies(jobs: Sequence[Job], seed: int) -> list[bytes]:
    """Return a POST for each job, with token ids."""
    prompts = Prompts(model.VOCABULARY, seed, LONGEST, True, False, ANSWER_TOKENS, SYSTEMS, SYSTEM_TOKENS)
    return prompts.bodies(jobs, seed)


def run(args: Namespace) -> Piece:
    """Measure TTFT behind each router. All routers have the same prefill servers, stock by default, so that only the
    routers differ. Raises ServerError or ConnectionError."""
    device: Device = args.device
    count, own = args.prefill or 3, device.name != CPU
    names = (STOCK, LAPS) if count == TWO else ALL
    # Several servers share the cores, so the model is smaller than for a single server.
    checkpoint = device.checkpoint() if own else model.make(Path(os.environ.get("LAPS_MODELS", MODELS)))
    variant, seconds = LAPS_PREFILL if args.laps_prefill else FCFS, args.seconds or 20.0
    prefill, decode = ("--max-total-tokens", "65536"), ("--max-total-tokens", "262144")
    with site(device, checkpoint, variant, count, names, args.out, args.say, prefill=prefill, decode=decode) as up:
        alone = [Job(0.0, sum(DOCUMENT_TOKENS) // 2)] * 6
        alone_s = statistics.median(asyncio.run(client.one_by_one(up.routers[STOCK], bodies(alone, 0)))[1:])
        # Without emulated devices servers share this machine's cores, which limit how many run at a time.
        at_once = count if own else min(count, len(os.sched_getaffinity(0)))
        documents_per_s = LONG_LOAD * at_once / alone_s

        def once(i: int, name: str) -> dict[str, Any]:
            jobs = arrivals(seconds, documents_per_s, random.Random(2 + i))
            return brief(up.replay(name, jobs, bodies(jobs, 1 + i)))

        seen = take_turns(names, args.rounds, once, args.say)
    where = device.what if own else "this machine"
    settings = {
        "prefill": count, "laps": args.laps_prefill, "device": where,
        "document_alone_s": alone_s, "documents_per_s": documents_per_s, "turns_per_s": TURNS_PER_S,
    }  # fmt: skip
    found, few, judged = Comparison(seen), count == TWO, []
    for kind, bar in ((SHORT, bars.BEHIND_ROUTER), (LONG, bars.BEHIND_ROUTER_LONG)):
        best = best_other(found, kind, {LAPS})
        for name in sorted({STOCK, best}):
            title = f"{kind} P90 TTFT behind the router, laps / {name}" + ("" if few or name != best else " (the best)")
            # Two servers leave little choice: the bar is that neither class loses.
            against = bars.NO_LOSS if few else bar if name == best else None
            judged.append(found.figure(title, LAPS, name, (kind, "p90_ms"), against))
    text = (
        f"{count} real prefill servers ({'LAPS' if args.laps_prefill else 'stock'}) on {where}, and a decode server; "
        f"conversations that share {SYSTEMS} system prompts of "
        f"{SYSTEM_TOKENS} tokens, and documents of {DOCUMENT_TOKENS[0]} to {DOCUMENT_TOKENS[1]}; the same arrivals "
        "behind all routers, in turns. gateway: SGLang's Rust gateway with the prefill policy that is named. Medians "
        "over rounds, in ms."
    )
    table, data = found.table("TTFT (ms)", "router", (*TTFT, FAILED)), {**settings, "rounds": seen}
    name, title = "router-two" if few else "router-real", "Chats and documents behind the routers"
    return Piece(name, title, text, 1, [table], judged, data=data)
