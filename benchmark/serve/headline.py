"""The headline: short prompts among long ones at 60% of capacity, LAPS against stock policies; then an overload.

    python -m benchmark.serve.headline [--rounds 5] [--seconds 12] [--out out]

Two results: ``headline`` with its bars, and ``overload`` (120%, more short prompts than the machine can serve), where
no request of either class waits longer than LAPS promises. Under ten minutes on two cores.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from laps_core.policy.gap import PATIENCE
from laps_plan.traffic import named

from benchmark.load.prompts import Prompts
from benchmark.results import KINDS, Command, Figure, Piece, Table
from benchmark.results.bars import NO_MORE
from benchmark.rig import devices
from benchmark.rig.devices import Device
from benchmark.rig.fleet import Fleet, get_json
from benchmark.rig.variants import BUILT_IN, FCFS, LAPS, SPF, STOCK
from benchmark.serve.command import LONG_CHUNKS, how_served, piece_of_open
from benchmark.serve.compare import Bench, Compared, Measured, Settings
from benchmark.serve.promises import Terms, worst

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
    """Return the bounds' terms on this machine; gap and settings are read from the LAPS server."""
    fleet.target(LAPS)
    status = get_json(fleet.prefill(LAPS), "/laps_status")
    assert status is not None
    gap_s, config = status["preemption"]["gap_ms"] / 1e3, status["config"]
    slice_s = config["slice_ms"] / 1e3
    return Terms(measured.lone, gap_s, PATIENCE, config["guard"], fleet.device.chunk, slice_s, longest)


def run(args: argparse.Namespace) -> Iterator[tuple[Piece, Path]]:
    """Yield both pieces, measured on the same servers."""
    device: Device = args.device
    say, out = args.say, {name: args.out / name for name in ("headline", "overload")}
    prompts, longest = Prompts(device.vocabulary, args.seed, device.longest), LONG_CHUNKS * device.chunk
    settings = Settings(args.rounds, args.seconds, 0.6, args.seed, 10.0, longest, calibrate_s=4.0)
    over = replace(settings, rounds=max(1, args.rounds // 2), span_s=0.6 * args.seconds, utilisation=1.2)
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
main = COMMAND.main

if __name__ == "__main__":
    sys.exit(main())
