"""Benefit and cost of slices: short requests that arrive during a long batch, and long requests alone.

    ./run bench slices [--rounds 5] [--tokens 8192] [--out out/slices]
    ./run bench slices --device emulated:h200-qwen3-32b,slow=4   # FlowPrefill's blocking time

Two prefill servers, in turns, have chunks that hold the whole long prompt: stock fcfs, which runs the prompt in one
pass, and LAPS. Here a slice is one layer, the smallest possible. LAPS with ``slice_ms`` 0 is no baseline, because it
cuts such a prompt into smaller chunks.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from laps_core.config import LapsConfig
from laps_plan.traffic.job import Job

from benchmark.load import Prompts, Target, client
from benchmark.results import Bar, Command, Figure, Parser, Piece, Ratio, Table, at_least, quantile, ratio, take_turns
from benchmark.results.bars import LONE, NO_MORE
from benchmark.rig import BUILT_IN, FCFS, LAPS, Device, Fleet, devices

NAMES = (FCFS, LAPS)
SHORT_TOKENS = 64
SHORTS, LONGS, MEETINGS = 24, 3, 12
"""Requests of a round: short requests alone, long requests alone, short requests during a long one."""
WITHIN = (0.1, 0.8)
"""Arrival of the short request, as shares of the long one's lone time."""
HOST_MS = 1.0
"""Longest time to launch the short batch after the current slice (ms)."""


@dataclass
class Seen:
    """TTFTs (seconds) of one variant: a list per round."""

    short: list[list[float]] = field(default_factory=list)
    long: list[list[float]] = field(default_factory=list)
    met: list[list[float]] = field(default_factory=list)
    """Short requests that arrived in the middle of a long batch."""


def one_round(target: Target, prompts: Prompts, tokens: int, seed: int) -> tuple[list[float], ...]:
    """Run short requests alone, long ones alone, and both together; return their TTFTs. Raises ConnectionError if a
    request fails."""
    rng = random.Random(seed)
    short, long = Job(0.0, SHORT_TOKENS), Job(0.0, tokens)
    shorts = asyncio.run(client.one_by_one(target, prompts.bodies([short] * (SHORTS + 1), seed)))[1:]
    longs = asyncio.run(client.one_by_one(target, prompts.bodies([long] * LONGS, seed + 1)))
    met = []
    for i in range(MEETINGS):
        jobs = [long, Job(statistics.median(longs) * rng.uniform(*WITHIN), SHORT_TOKENS)]
        answers = asyncio.run(client.replay(target, jobs, prompts.bodies(jobs, seed + 2 + i), 60.0))
        if any(a.ttft_s is None for a in answers):
            raise ConnectionError(f"a request to {target.url} failed")
        met += [a.ttft_s for a in answers[1:] if a.ttft_s is not None]
    return shorts, longs, met


def measure(fleet: Fleet, rounds: int, tokens: int, seed: int) -> dict[str, Seen]:
    def once(i: int, name: str) -> tuple[list[float], ...]:
        return one_round(fleet.target(name), fleet.prompts, tokens, seed * 1000 + 100 * i)

    seen = take_turns(NAMES, rounds, once, fleet.say)
    return {name: Seen(*map(list, zip(*of, strict=True))) for name, of in seen.items()}


def flat_ms(rounds: Sequence[Sequence[float]]) -> list[float]:
    """Return all values of all rounds (ms)."""
    return [1e3 * t for t in itertools.chain(*rounds)]


def over(new: Sequence[Sequence[float]], base: Sequence[Sequence[float]]) -> Ratio:
    """Return the ratio of the rounds' medians."""
    return ratio(*(list(map(statistics.median, rounds)) for rounds in (new, base)))


def figures(seen: dict[str, Seen], layers: int, tokens: int) -> list[Figure]:
    """Return figures of the benefit and cost of slices, with bars."""
    laps, stock = seen[LAPS], seen[FCFS]
    alone, long = ([statistics.median(r) for r in rounds] for rounds in (laps.short, laps.long))
    slices_s = 2 * statistics.median(long) / layers
    ratios = [quantile(met, 90) / (short + slices_s) for met, short in zip(laps.met, alone, strict=True)]
    pooled = quantile(flat_ms(laps.met), 90) / 1e3 / (statistics.median(alone) + slices_s)
    title = f"P90 TTFT of a short request in the middle of {tokens} tokens, over lone TTFT + 2 slices"
    met = Figure.of(title, pooled, NO_MORE, len(ratios))
    met.low, met.high = min(ratios), max(ratios)
    return [
        met,
        Figure.of(f"TTFT of {tokens} tokens alone, in slices / in one piece", over(laps.long, stock.long), LONE),
        Figure.of("TTFT of a short request alone, LAPS / fcfs", over(laps.short, stock.short), LONE),
    ]


def blocking(laps: Seen, slow: float = 1.0, slice_ms: float | None = None) -> Figure:
    """Return FlowPrefill's blocking time: from the decision to preempt to the launch of the short batch, in ms of the
    unscaled device. Measured as the extra wait of a short request in the middle of a long batch. ``slice_ms``: None for
    no bar."""
    rounds = zip(laps.met, map(statistics.median, laps.short), strict=True)
    waits = [1e3 * (t - alone) / slow for met, alone in rounds for t in met]
    bar = None if slice_ms is None else Bar(most=slice_ms + HOST_MS)
    return Figure.of("blocking time, P99 (ms)", quantile(waits, 99), bar, len(laps.met))


def options(p: Parser) -> None:
    p.add_argument("--tokens", type=at_least(512), default=8192, help="tokens of the long prompt, in one chunk (8192)")
    devices.add_device(p)


def run(args: argparse.Namespace) -> Piece:
    device = replace(args.device, chunk=args.tokens)
    prompts = Prompts(device.vocabulary, args.seed, args.tokens)
    with Fleet(device, [BUILT_IN[name] for name in NAMES], prompts, args.out, args.say) as fleet:
        return piece_of(measure(fleet, args.rounds, args.tokens, args.seed), device, args.tokens, args.seed)


def piece_of(seen: dict[str, Seen], device: Device, tokens: int, seed: int) -> Piece:
    heads = ("variant", "short alone P50", "P90", "short that meets a long one P50", "P90", "long alone P50")
    rows = [
        (
            name, *(f"{quantile(flat_ms(of), q):.1f}" for of in (s.short, s.met) for q in (50, 90)),
            f"{quantile(flat_ms(s.long), 50):.0f}",
        )
        for name, s in seen.items()
    ]  # fmt: skip
    note = f"TTFT in ms. Short: {SHORT_TOKENS} tokens, long: {tokens} in one chunk of {device.layers} layers."
    text = f"A prefill server alone, {device.what}; {len(seen[LAPS].met)} rounds, the servers in turns."
    told, data = figures(seen, device.layers, tokens), {name: vars(s) for name, s in seen.items()}
    told.append(blocking(seen[LAPS], device.slow, LapsConfig().slice_ms if device.emulated else None))
    return Piece("slices", "Slices", text, seed, [Table("Slices", heads, rows, note)], told, data=data)


COMMAND = Command("./run bench slices", __doc__, run, options, out="slices", rounds=5, seed=1, every=True)

if __name__ == "__main__":
    sys.exit(COMMAND.main())
