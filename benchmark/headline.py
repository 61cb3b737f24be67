"""The headline: short prompts among long ones at 60% of capacity, LAPS against stock policies; then an overload.

    python -m benchmark.headline [--rounds 5] [--seconds 8] [--out out]

Two results: ``headline`` with its bars, and ``overload`` (120%, more short prompts than the machine can do), where LAPS
keeps the promise of its share to the long ones. Under six minutes on two cores.
"""

from __future__ import annotations

import argparse
import math
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import uvloop

from benchmark.rig import model
from benchmark.rig.piece import Figure, Piece, Table, command
from benchmark.serve import LONG_CHUNKS, how_served, piece_of_open, show
from benchmark.serving import calibrate, compare, devices, workloads
from benchmark.serving.compare import Compared, Progress, Settings
from benchmark.serving.devices import CPU, CUDA, DEVICES
from benchmark.serving.fleet import Fleet, one_line_errors
from benchmark.serving.prompts import Prompts
from benchmark.serving.variants import BUILT_IN, LAPS, STOCK

NAMES = (*STOCK, LAPS)
OVERLOADED = ("shortest-prefill-first", LAPS)
SHORT_BAR, LONG_BAR, RATE_BAR = 0.5, 1.05, 0.98
ALLOWED = 1.25
"""Of what the share promises, before a long wait counts as beyond it: lone TTFTs are medians, and a short batch that
runs is never cut off."""


def best(compared: Compared, path: tuple[str, ...], pick: object = min) -> str:
    """The stock policy with the best median of a figure."""
    assert callable(pick)
    return str(pick(STOCK, key=lambda name: statistics.median(compared.values(name, *path))))


def headline(compared: Compared) -> list[Figure]:
    """The three bars."""
    short, rate = ("short", "p90_ms"), ("requests_per_s",)
    quick, many = best(compared, short), best(compared, rate, max)
    figures = []
    for label, path, base, bars in (
        ("short P90 TTFT", short, quick, {"most": SHORT_BAR}),
        ("long P90 TTFT", ("long", "p90_ms"), "fcfs", {"most": LONG_BAR}),
        ("requests/s", rate, many, {"least": RATE_BAR}),
    ):
        r = compared.ratio(LAPS, base, *path)
        if r is not None:
            of = f"{base}, the best of stock" if path != ("long", "p90_ms") else base
            figures.append(Figure.of(f"{label}, {LAPS} / {of}", r, **bars))
    return figures


def promise(compared: Compared) -> tuple[Table, list[Figure]]:
    """Longest long wait over what LAPS's share promises, per variant."""
    rows: list[Sequence[str]] = []
    figures = []
    busy = statistics.median(compared.busy[LAPS])
    for name in OVERLOADED:
        worst = [busy * ratio for ratio in compared.values(name, "long_over_promise")]
        waits = compared.values(name, "long", "longest_wait_s")
        rows.append((name, f"{max(waits):.2f}", f"{max(worst):.2f}", *(f"{w:.2f}" for w in worst)))
        figure = Figure(f"longest long TTFT over what the share promises, {name}", max(worst), rounds=len(worst))
        if name == LAPS:
            figure.bar, figure.met = f"<= {ALLOWED:g}", max(worst) <= ALLOWED
        if name == "shortest-prefill-first":
            figure.bar, figure.met = f"> {ALLOWED:g} (it promises nothing)", max(worst) > ALLOWED
        figures.append(figure)
    rounds = len(compared.answers[LAPS])
    heads = ("variant", "longest wait s", "worst / promised", *(f"round {i + 1}" for i in range(rounds)))
    note = (
        f"Promised: the long work (lone seconds) before and in a request, over {workloads.LONG_SHARE:g}, LAPS's "
        "default share of busy time while both classes wait, and over the share of these rounds in which the device of "
        f"its server was busy, {busy:.2f}. 1 = just kept."
    )
    return Table("Longest wait of a long prompt under overload", heads, rows, note), figures


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="./run bench", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=5, help="at least 5 for a verdict (5)")
    parser.add_argument("--seconds", type=float, default=8.0, help="of arrivals in a round (8)")
    parser.add_argument("--device", choices=(CPU, CUDA), help="(cuda where there is one)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--out", type=Path, default=model.REPO / "out", help="results go to its headline/ and overload/"
    )
    args = parser.parse_args(argv)
    if args.rounds < 1 or args.seconds <= 0:
        parser.exit(2, f"{parser.prog}: --rounds and --seconds are positive\n")
    # Ended by its keeper it still stops its servers.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    uvloop.install()
    say = Progress(time.monotonic(), time.monotonic)
    with one_line_errors("bench"):
        pieces = _run(args, say)
    for piece in pieces:
        piece.command = command("benchmark.headline", argv)
        piece.write(args.out / piece.name)
        show(piece, args.out / piece.name)
    say("done")
    return 0


def _run(args: argparse.Namespace, say: Progress) -> list[Piece]:
    device = DEVICES[args.device or (CUDA if devices.has_cuda() else CPU)]
    prompts = Prompts(device.vocabulary, args.seed, device.longest, reuse=False, prefill_only=True)
    longest = LONG_CHUNKS * device.chunk
    settings = Settings(args.rounds, args.seconds, 0.6, args.seed, 10.0, longest, calibrate_s=4.0)
    over = replace(settings, rounds=max(1, args.rounds // 2), span_s=0.6 * args.seconds, utilisation=1.2)
    found = [BUILT_IN[n] for n in NAMES]
    how = how_served(device, device.chunk, pd=False, prefill_only=True)
    with Fleet(device, device.chunk, found, False, args.out / "headline", prompts, say) as fleet:
        mixed, heavy = (
            workloads.make(n, workloads.Scale(settings.longest, settings.longest)) for n in ("mixed", "overload")
        )
        say("measuring the machine with fcfs")
        measured = compare.measure(fleet, "fcfs", mixed, prompts, settings)
        say(f"capacity {measured.capacity_per_s:.1f} requests/s of the mix")
        compared = compare.run(fleet, NAMES, mixed, measured, prompts, settings, say)
        heavy_measured = recalibrated(fleet, heavy, measured, prompts, settings)
        say(f"capacity {heavy_measured.capacity_per_s:.1f} short requests/s")
        overloaded = compare.run(fleet, OVERLOADED, heavy, heavy_measured, prompts, over, say)
    first = piece_of_open("headline", compared, mixed, NAMES, "fcfs", settings, how, args.out / "headline")
    first.title = "Headline: short prompts among long ones"
    first.figures = [*headline(compared), *first.figures]
    second = piece_of_open("overload", overloaded, heavy, OVERLOADED, OVERLOADED[0], over, how, args.out / "overload")
    second.title = "Overload: what the share promises the long ones"
    second.text += (
        " In each round SGLang's shortest-prefill-first looks up the prefix of every waiting request, and its "
        "throughput falls as they become many."
    )
    table, figures = promise(overloaded)
    second.tables.insert(0, table)
    second.figures = [*figures, *(f for f in second.figures if not math.isinf(f.value))]
    return [first, second]


def recalibrated(
    fleet: Fleet, workload: workloads.Workload, measured: compare.Measured, prompts: Prompts, settings: Settings
) -> compare.Measured:
    """The same machine under another workload."""
    target = fleet.target("fcfs")
    return compare.Measured(
        measured.lone, calibrate.capacity(target, workload, prompts, settings.calibrate_s, settings.seed), measured.on
    )


if __name__ == "__main__":
    sys.exit(main())
