"""The headline: short prompts among long ones at 60% of capacity, LAPS against stock policies; then an overload.

    python -m benchmark.serve.headline [--rounds 5] [--seconds 12] [--out out]

Two results: ``headline`` with its bars, and ``overload`` (120%, more short prompts than the machine can serve), where
no request of either class waits longer than LAPS promises. Under ten minutes on two cores.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from laps_core.policy.fairness import SAVED, stretch
from laps_core.policy.preemption import DEPTH
from laps_plan.traffic import named
from laps_plan.traffic.job import LONG, SHORT, THRESHOLD

from benchmark.load import Answer, Prompts
from benchmark.results import KINDS, Command, Figure, Namespace, Piece, Table
from benchmark.results.bars import NO_MORE
from benchmark.rig import BUILT_IN, FCFS, LAPS, SPF, STOCK, Device, Fleet, devices, get_json
from benchmark.serve.command import LONG_CHUNKS, how_served, piece_of_open
from benchmark.serve.compare import Bench, Compared, Measured, Settings


@dataclass(frozen=True)
class Terms:
    """Terms of the bounds. Times in seconds."""

    lone_s: Callable[[int], float]
    gap_s: float
    """G, reported by the server."""
    guard: float
    chunk: int
    """New tokens of a long batch."""
    slice_s: float
    longest: int
    """Longest prompt (tokens)."""

    @property
    def short_batch(self) -> int:
        """Return the new tokens of a batch that preempts."""
        return max(THRESHOLD, self.chunk // 2)

    @property
    def short_batch_s(self) -> float:
        """Return S, the time of a batch that preempts."""
        return self.lone_s(self.short_batch)

    @property
    def long_batch_s(self) -> float:
        """Return B, the time of the longest prompt's last chunk."""
        return max(self.lone_s(self.longest) - self.lone_s(self.longest - self.chunk), self.lone_s(self.chunk))

    def long_s(self, work_s: float) -> float:
        """Return the bound of a long prompt's TTFT (seconds). ``work_s``: lone time of the prompt and those ahead."""
        gap, short = self.gap_s, self.short_batch_s
        # Prompts that overtake the long prompt, at most one per gap, are no larger than a short batch.
        share = min(self.guard, gap / (gap + short))
        # Short requests that share steps can take up to half of the steps, so long work and batch count twice.
        return ((2 * work_s + 2 * self.long_batch_s) / share + gap) * stretch(gap, short) + (SAVED - 1) * short

    def short_s(self, tokens: int) -> float:
        """Return the bound of a short request's TTFT (seconds). ``tokens``: its own and those of short ones ahead."""
        # A batch is full when the next request does not fit.
        batches = 1 + tokens // (self.short_batch - THRESHOLD + 1)
        # If preempting does not pay, the request waits for the paused batches: a long batch, a batch overtaken by that
        # batch, and the batches that preempt them. The last short batch can share a long step.
        whole_s = self.long_batch_s * stretch(self.gap_s, self.short_batch_s) + (SAVED - 1) * self.short_batch_s
        return self.slice_s + (1 + batches) * (self.gap_s + DEPTH * whole_s + self.short_batch_s)


def _ahead(answers: Sequence[Answer], size: Callable[[Answer], float]) -> list[float]:
    """Return for each request its size plus the sizes of requests that were sent before and have no answer yet."""
    out = []
    for i, a in enumerate(answers):
        waiting = (b for b in answers[:i] if b.ttft_s is None or b.sent_s + b.ttft_s > a.sent_s)
        out.append(size(a) + sum(size(b) for b in waiting))
    return out


def worst(answers: Sequence[Answer], kind: str, terms: Terms) -> float:
    """Return the largest TTFT over its bound in a round; infinite if a request failed, NaN without requests."""
    mine = sorted((a for a in answers if a.job.kind == kind), key=lambda a: a.sent_s)
    if kind == LONG:
        bounds = [terms.long_s(work) for work in _ahead(mine, lambda a: terms.lone_s(a.job.new))]
    else:
        assert kind == SHORT
        bounds = [terms.short_s(int(t)) for t in _ahead(mine, lambda a: a.job.new)]
    ratios = [math.inf if a.ttft_s is None else a.ttft_s / b for a, b in zip(mine, bounds, strict=True)]
    return max(ratios, default=math.nan)


NAMES = (*STOCK, LAPS)
OVERLOADED = (FCFS, SPF, LAPS)


def promise(compared: Compared, terms: Terms) -> tuple[Table, list[Figure]]:
    """Return the largest TTFT over its bound, per variant and class."""
    rows: list[Sequence[str]] = []
    figures = []
    rounds = len(compared.answers[LAPS])
    for name in OVERLOADED:
        for kind in KINDS:
            ratios = [worst(answers, kind, terms) for answers in compared.answers[name]]
            waits = compared.comparison.values(name, kind, "longest_wait_s")
            rows.append((name, kind, f"{max(waits):.2f}", f"{max(ratios):.2f}", *(f"{r:.2f}" for r in ratios)))
            bar = NO_MORE if name == LAPS else None
            figures.append(Figure.of(f"longest {kind} TTFT over the promised bound, {name}", max(ratios), bar, rounds))
    heads = ("variant", "class", "longest wait s", "worst / bound", *(f"round {i + 1}" for i in range(rounds)))
    note = (
        f"The bounds that docs/LAPS.md states, with G = {terms.gap_s * 1e3:.0f} ms (as the server says), "
        f"S = {terms.short_batch_s * 1e3:.0f} ms ({terms.short_batch} tokens), B = {terms.long_batch_s * 1e3:.0f} ms "
        "(the last chunk of the longest prompt) and the work of requests in lone seconds. Stock policies promise "
        "nothing."
    )
    return Table("Longest waits under overload", heads, rows, note), figures


def terms(fleet: Fleet, measured: Measured, longest: int) -> Terms:
    """Return the terms of the bounds on this machine; gap and settings come from the LAPS server."""
    fleet.target(LAPS)
    status = get_json(fleet.prefill(LAPS), "/laps_status")
    assert status is not None
    gap_s, config = status["preemption"]["gap_ms"] / 1e3, status["config"]
    return Terms(measured.lone, gap_s, config["guard"], fleet.device.chunk, config["slice_ms"] / 1e3, longest)


def run(args: Namespace) -> Iterator[tuple[Piece, Path]]:
    """Yield both pieces, measured on the same servers."""
    device: Device = args.device
    say, out = args.say, {name: args.out / name for name in ("headline", "overload")}
    prompts, longest = Prompts(device.vocabulary, args.seed, device.longest), LONG_CHUNKS * device.chunk
    settings = Settings(args.rounds, args.seconds, 0.6, args.seed, longest, calibrate_s=4.0)
    # Long enough for several long prompts.
    over = replace(settings, rounds=max(1, args.rounds // 2), utilisation=1.2, span_s=2 * settings.span_s)
    how = how_served(device, pd=False, new_only=True)
    mixed, heavy = (named.make(n, named.Scale(longest, longest)) for n in ("mixed", "overload"))
    with Fleet(device, [BUILT_IN[n] for n in NAMES], prompts, out["headline"], say) as fleet:
        bench = Bench(fleet, NAMES, prompts, settings, say)
        measured = bench.measure(FCFS, mixed)
        compared = bench.run(mixed, measured)
        shorts = bench.measure(FCFS, heavy, measured.lone)
        overloaded = Bench(fleet, OVERLOADED, prompts, over, say).run(heavy, shorts)
        bounds = terms(fleet, measured, longest)
    first = piece_of_open("headline", compared, mixed, FCFS, settings, how, out["headline"])
    first.title = "Headline: short prompts among long ones"
    yield first, out["headline"]
    second = piece_of_open("overload", overloaded, heavy, FCFS, over, how, out["overload"])
    second.title = "Overload: the longest waits"
    second.text += (
        " In each round SGLang's shortest-prefill-first looks up the prefix of every waiting request, and its "
        "throughput falls as they become many."
    )
    table, figures = promise(overloaded, bounds)
    second.tables.insert(0, table)
    second.figures = [*figures, *(f for f in second.figures if not math.isinf(f.value))]
    yield second, out["overload"]


COMMAND = Command("benchmark.serve.headline", __doc__, run, devices.add_device, out="", rounds=5, seed=1, seconds=12.0)

if __name__ == "__main__":
    sys.exit(COMMAND.main())
