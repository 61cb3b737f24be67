"""Quotes and replays of a real server against what was measured.

python -m benchmark.serve.quotes --device emulated:h200-qwen3-8b,slow=10
python -m benchmark.serve.quotes --device cpu --workloads poisson code --shares 0.5 0.85 --no-fcfs

Each load runs at shares of what the server's own latency model says fcfs can do. Of quotes the server's counters tell
how many first tokens came inside their interval. The requests of the last load are then replayed, from the server's
receipts or, where it keeps none, from what the client has measured: under the server's own policy, and under fcfs,
which a second server runs for comparison.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import msgspec
import numpy as np
from laps_core.length import CLASSES, classify
from laps_core.receipts.quote import QuoteState
from laps_plan.profile import Profile
from laps_plan.replay.replay import HERE, Policy, config_of, policies, quantiles, replay
from laps_plan.replay.source import fetch
from laps_plan.traffic import named
from laps_plan.traffic.job import Job
from laps_plan.traffic.recording import Head, Recorded, Recording

from benchmark.load import client
from benchmark.load.connection import Target
from benchmark.load.prompts import Prompts
from benchmark.results import Command, Parser, Piece, Table, count
from benchmark.results.bars import INSIDE, REPLAYED, REPLAYED_FCFS
from benchmark.rig import devices
from benchmark.rig.fleet import Fleet, flush, get_json
from benchmark.rig.variants import BUILT_IN, FCFS, LAPS
from benchmark.sim.loads import offer

PATIENCE_S = 60.0
HEADS = ("", "requests", "inside", "short", "long", "below", "above", "beyond the bound")


def _status(target: Target) -> dict[str, Any]:
    """Return the status of a server that quotes. Raises ConnectionError where it does not."""
    said = get_json(target, "/laps_status") or {}
    if not said.get("quote"):
        raise ConnectionError("the server quotes nothing yet")
    return said


def _jobs(workload: str, share: float, status: dict[str, Any], args: argparse.Namespace) -> list[Job]:
    """Return a load at a share of the capacity, as the server's own latency model tells it."""
    state = msgspec.convert(status["quote"], QuoteState)
    profile = Profile(name="server", source="its own model", coefficients=state.model)
    made = named.make(workload, named.Scale(args.longest, min(args.longest, 4 * state.chunk)))
    offered = offer(made, share, profile, args.seed, span_s=args.seconds, chunk=state.chunk, cached=0)
    # Without a decode server no prefix is kept.
    return [replace(job, cached=0, goes_on=False) for job in made.arrivals(offered, random.Random(args.seed))]


def _send(fleet: Fleet, name: str, jobs: list[Job], seed: int) -> list[client.Answer]:
    target = fleet.target(name)
    flush(target)
    return asyncio.run(client.replay(target, jobs, fleet.prompts.bodies(jobs, seed), PATIENCE_S))


def _recording(answers: list[client.Answer], status: dict[str, Any]) -> Recording:
    state = msgspec.convert(status["quote"], QuoteState)
    head = Head(
        model=state.model, config=status["config"], chunk=state.chunk, layers=state.layers,
        launch_s=status["slices"]["launch_ms"] / 1e3, overlap=status["overlap"],
    )  # fmt: skip
    rows = [
        Recorded(
            arrival_ms=1e3 * a.sent_s, new_tokens=a.job.new, cls=classify(a.job.new, state.threshold),
            ttft_ms=1e3 * a.ttft_s,
        )
        for a in answers
        if a.ttft_s is not None
    ]  # fmt: skip
    return Recording(head, sorted(rows, key=lambda r: r.arrival_ms))


def _receipts(target: Target, seconds: float) -> Recording | None:
    """Return a recording by the server's own receipts; None where it keeps none."""
    try:
        return fetch(target.url, seconds)
    except ValueError:
        return None


def _counts(status: dict[str, Any]) -> Any:
    outcomes = status["quotes"]["outcomes"]
    return np.array([[outcomes[cls][side] for side in ("inside", "below", "above")] for cls in CLASSES])


def _row(before: dict[str, Any], after: dict[str, Any]) -> tuple[float, Sequence[str]]:
    """Return the share of first tokens inside their interval, and the cells of a load."""
    found = _counts(after) - _counts(before)
    inside, below, above = (found.sum(axis=0) / max(1, found.sum())).tolist()
    each = [f"{row[0] / row.sum():.1%}" if row.sum() else "-" for row in found]
    beyond = after["quotes"]["beyond_bound"] - before["quotes"]["beyond_bound"]
    return inside, (str(found.sum()), f"{inside:.1%}", *each, f"{below:.1%}", f"{above:.1%}", str(beyond))


def options(p: Parser) -> None:
    """Add the options of this command."""
    devices.add_device(p)
    p.add_argument("--workloads", nargs="+", default=["poisson"], choices=list(named.OPEN))
    p.add_argument("--shares", nargs="+", type=float, default=[0.85], help="of the capacity (0.85)")
    p.add_argument("--longest", type=count, help="longest prompt (tokens; as the device has it)")
    p.add_argument("--no-fcfs", action="store_true", help="start no second server")


def run(args: argparse.Namespace) -> Piece:
    """Run the loads on the server, and replay the last one."""
    device: devices.Device = args.device
    args.longest = args.longest or device.longest
    names = [LAPS, *([] if args.no_fcfs else [FCFS])]
    prompts = Prompts(device.vocabulary, args.seed, args.longest)
    text = f"One prefill server, {device.what}. Loads of {args.seconds:g} s."
    quoted, replays = Table("Quotes", HEADS, []), Table("Replays, ms", ("", "measured", "replayed", "ratio"), [])
    piece = Piece("serve-quotes", "Quotes and replays of a real server", text, args.seed, [quoted, replays])
    with Fleet(device, [BUILT_IN[n] for n in names], prompts, args.out, args.say, together=False) as fleet:
        target = fleet.target(LAPS)
        for workload, share in product(args.workloads, args.shares):
            before, title = _status(target), f"{workload} {share:.0%}"
            jobs, begin = _jobs(workload, share, before, args), time.monotonic()
            args.say(f"{title}: {len(jobs)} requests")
            answers = _send(fleet, LAPS, jobs, args.seed)
            after = _status(target)
            inside, cells = _row(before, after)
            quoted.rows = [*quoted.rows, (title, *cells)]
            piece.judge(f"inside the interval, {title}", inside, INSIDE)
        recording = _receipts(target, time.monotonic() - begin) or _recording(answers, after)
        recording.save(args.out / "recording.jsonl")
        measured = [("replayed, here", recording, HERE, REPLAYED)]
        if not args.no_fcfs:
            seen = _recording(_send(fleet, FCFS, jobs, args.seed), after)
            measured.append(("replayed, fcfs", seen, FCFS, REPLAYED_FCFS))
    own = next(p for p in policies(config_of(recording)) if p.name == HERE)
    again = {r.policy.name: quantiles(recording, r.ttft_ms) for r in replay(recording, [own, Policy(FCFS, FCFS)])}
    for title, seen, name, bar in measured:
        wanted = quantiles(seen, [r.ttft_ms for r in seen.requests])
        for cls, q in product(wanted, ("p50", "p90")):
            is_ms, was_ms = again[name][cls][q], wanted[cls][q]
            words = f"{title}, {cls} {q.upper()}"
            replays.rows = [*replays.rows, (words, f"{was_ms:.1f}", f"{is_ms:.1f}", f"{is_ms / was_ms:.3f}")]
            piece.judge(f"{words} over measured", is_ms / was_ms, bar)
    return piece


COMMAND = Command("benchmark.serve.quotes", __doc__, run, options, out="serve-quotes", seed=1, seconds=60.0, every=True)

if __name__ == "__main__":
    sys.exit(COMMAND.main())
