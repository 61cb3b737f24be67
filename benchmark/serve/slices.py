"""Benefit and cost of slices: short requests that arrive during a long batch, and long requests alone.

    ./run bench slices [--rounds 5] [--out out/slices]
    ./run bench slices --device emulated:h200-qwen3-32b,slow=4   # FlowPrefill's blocking time

Two prefill servers, in turns, have chunks that hold the whole long prompt: stock fcfs, which runs the prompt in one
pass, and LAPS. Here a slice is one layer, the smallest possible. LAPS with ``slice_ms`` 0 is no baseline, because it
cuts such a prompt into smaller chunks.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain

from laps_core.config import LapsConfig
from laps_plan.traffic.job import Job

from benchmark.load import Prompts, Target, client
from benchmark.results import Bar, Column, Command, Comparison, Figure, Piece, quantile, take_turns
from benchmark.results.bars import LONE, NO_MORE
from benchmark.rig import BUILT_IN, FCFS, LAPS, Device, Fleet, devices

NAMES = (FCFS, LAPS)
TOKENS, SHORT_TOKENS = 8192, 64
"""Tokens of a long prompt, which one chunk holds, and of a short one."""
SHORTS, LONGS, MEETINGS = 24, 3, 12
"""Requests of a round: short requests alone, long requests alone, short requests during a long one."""
WITHIN = (0.1, 0.8)
"""Arrival of the short request, as shares of the long one's lone time."""
HOST_MS = 1.0
"""Longest time to launch the short batch after the current slice (ms)."""
COLUMNS = (
    Column("short alone P50", ("short", "p50"), ".1f"),
    Column("P90", ("short", "p90"), ".1f"),
    Column("short that meets a long one P50", ("met", "p50"), ".1f"),
    Column("P90", ("met", "p90"), ".1f"),
    Column("long alone P50", ("long", "p50")),
)

Round = Mapping[str, Sequence[float]]
"""TTFTs (seconds) of one round: ``short`` and ``long`` requests alone, and short ones that ``met`` a long batch."""
Seen = Mapping[str, Sequence[Round]]
"""Variant -> its rounds."""


def one_round(target: Target, prompts: Prompts, seed: int) -> Round:
    """Run short requests alone, long ones alone, and both together. Raises ConnectionError if a request fails."""
    rng = random.Random(seed)
    short, long = Job(0.0, SHORT_TOKENS), Job(0.0, TOKENS)
    shorts = asyncio.run(client.one_by_one(target, prompts.bodies([short] * (SHORTS + 1), seed)))[1:]
    longs = asyncio.run(client.one_by_one(target, prompts.bodies([long] * LONGS, seed + 1)))
    met = []
    for i in range(MEETINGS):
        jobs = [long, Job(statistics.median(longs) * rng.uniform(*WITHIN), SHORT_TOKENS)]
        answers = asyncio.run(client.replay(target, jobs, prompts.bodies(jobs, seed + 2 + i), 60.0))
        if any(a.ttft_s is None for a in answers):
            raise ConnectionError(f"a request to {target.url} failed")
        met += [a.ttft_s for a in answers[1:] if a.ttft_s is not None]
    return {"short": shorts, "long": longs, "met": met}


def measure(fleet: Fleet, rounds: int, seed: int) -> Seen:
    def once(i: int, name: str) -> Round:
        return one_round(fleet.target(name), fleet.prompts, seed * 1000 + 100 * i)

    return take_turns(NAMES, rounds, once, fleet.say)


def each(over: Callable[[Sequence[float]], float], seen: Seen) -> Comparison:
    """Return a figure of each round's TTFTs."""
    return Comparison({n: [{kind: over(ttft) for kind, ttft in one.items()} for one in of] for n, of in seen.items()})


def pooled_ms(seen: Seen) -> Comparison:
    """Return quantiles over the TTFTs of all rounds (ms)."""
    every = {n: {kind: [*chain(*(one[kind] for one in of))] for kind in of[0]} for n, of in seen.items()}
    return Comparison(
        {
            n: [{k: {f"p{q}": 1e3 * quantile(s, q) for q in (10, 50, 90)} for k, s in of.items()}]
            for n, of in every.items()
        }
    )


def figures(seen: Seen, layers: int) -> list[Figure]:
    """Return figures of the benefit and cost of slices, with bars."""
    alone, p90 = each(statistics.median, seen), each(lambda ttft: quantile(ttft, 90), seen)
    slices_s = 2 * alone.median(LAPS, "long") / layers
    met_s, short_s = p90.values(LAPS, "met"), alone.values(LAPS, "short")
    ratios = [met / (short + slices_s) for met, short in zip(met_s, short_s, strict=True)]
    pooled_s = pooled_ms(seen).median(LAPS, "met", "p90") / 1e3
    title = f"P90 TTFT of a short request in the middle of {TOKENS} tokens, over lone TTFT + 2 slices"
    met = Figure.of(title, pooled_s / (statistics.median(short_s) + slices_s), NO_MORE, len(ratios))
    met.low, met.high = min(ratios), max(ratios)
    return [
        met,
        alone.figure(f"TTFT of {TOKENS} tokens alone, in slices / in one piece", LAPS, FCFS, ("long",), LONE),
        alone.figure("TTFT of a short request alone, LAPS / fcfs", LAPS, FCFS, ("short",), LONE),
    ]


def blocking(laps: Sequence[Round], slow: float = 1.0, slice_ms: float | None = None) -> Figure:
    """Return FlowPrefill's blocking time: from the decision to preempt to the launch of the short batch, in ms of the
    unscaled device. Measured as the extra wait of a short request in the middle of a long batch. ``slice_ms``: None for
    no bar."""
    waits = [1e3 * (t - statistics.median(one["short"])) / slow for one in laps for t in one["met"]]
    bar = None if slice_ms is None else Bar(most=slice_ms + HOST_MS)
    return Figure.of("blocking time, P99 (ms)", quantile(waits, 99), bar, len(laps))


def run(args: argparse.Namespace) -> Piece:
    device = replace(args.device, chunk=TOKENS)
    prompts = Prompts(device.vocabulary, args.seed, TOKENS)
    with Fleet(device, [BUILT_IN[name] for name in NAMES], prompts, args.out, args.say) as fleet:
        return piece_of(measure(fleet, args.rounds, args.seed), device, args.seed)


def piece_of(seen: Seen, device: Device, seed: int) -> Piece:
    note = f"TTFT in ms. Short: {SHORT_TOKENS} tokens, long: {TOKENS} in one chunk of {device.layers} layers."
    text = f"A prefill server alone, {device.what}; {len(seen[LAPS])} rounds, the servers in turns."
    bar_ms = LapsConfig().slice_ms if device.emulated else None
    told = [*figures(seen, device.layers), blocking(seen[LAPS], device.slow, bar_ms)]
    table = pooled_ms(seen).table("Slices", "variant", COLUMNS, note)
    data = {name: Comparison(seen).by_figure(name) for name in seen}
    return Piece("slices", "Slices", text, seed, [table], told, data=data)


COMMAND = Command("./run bench slices", __doc__, run, devices.add_device, out="slices", rounds=5, seed=1, every=True)

if __name__ == "__main__":
    sys.exit(COMMAND.main())
