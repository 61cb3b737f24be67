"""Times of one prefill batch per row count on each of SGLang's own paths, and the effect of slices on its results.

    python -m benchmark.ladder                 on a GPU: Qwen2.5 shapes with dummy weights
    python -m benchmark.ladder --emulate       anywhere: a tiny model, eager only; no measure of gains

Paths: eager, the breakable graphs (SGLang's default), the full graphs with a ladder of row counts and 64 request slots.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmark.results import Command, Figure, Parser, Piece, Table
from benchmark.results.bars import SLICED_LOGITS
from benchmark.rig import model

ROWS = (8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
REQUESTS = (1, 4, 16, 64)
SLOTS = 64
REPEATS = 15
EAGER, BREAKABLE, FULL = "eager", "breakable", "full"
SLICED_TOKENS = 3000
SEEDED = ("tiny", "0.5B")
"""Shapes filled with seeded noise for weights: larger ones take minutes to fill."""
MARK = "LADDER "


def flags(shape: str, backend: str, attention: str) -> list[str]:
    """Return the server arguments."""
    if shape == "tiny":
        return ["--device", "cpu", "--dtype", "float32", "--max-total-tokens", "8192", "--chunked-prefill-size", "4096"]
    graph: dict[str, Any] = {"backend": backend, "bs": list(ROWS), "max_bs": ROWS[-1]}
    if backend == FULL:
        graph["full_prefill_max_req"] = SLOTS
    return [
        "--dtype", "bfloat16", "--attention-backend", attention, "--mem-fraction-static", "0.7", "--max-total-tokens",
        "65536", "--max-running-requests", "128", "--chunked-prefill-size", "8192",
        "--cuda-graph-config", json.dumps({"prefill": graph, "decode": {"backend": "disabled"}}),
    ]  # fmt: skip


def one(shape: str, backend: str, attention: str) -> None:
    """Time every batch on this path, with the breakable graphs also eager; print one line. Ends the process."""
    from benchmark.rig import runner as rig

    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        written = model.write_shape(shape, Path(folder))
        runner = rig.boot(written, *flags(shape, backend, attention), seed=1 if shape in SEEDED else None)
        booted_s = time.perf_counter() - begin
    rng = random.Random(0)
    stock = runner.prefill_cuda_graph_runner
    paths = {backend: stock} if backend == FULL else {BREAKABLE: stock, EAGER: runner.eager_runner}
    times = []
    for rows in ROWS:
        for count in (c for c in REQUESTS if c <= rows):
            lens = [rows // count + (i < rows % count) for i in range(count)]
            seen: dict[str, list[float]] = {path: [] for path in paths}
            replayed = {}
            for _ in range(REPEATS):
                for path, front in paths.items():
                    runner.prefill_cuda_graph_runner = front
                    ms, replayed[path] = timed(runner, lens, rng, model.SHAPES[shape].vocab)
                    seen[path].append(ms)
            row: dict[str, Any] = {"rows": rows, "requests": count}
            ran = {p: t[2:] for p, t in seen.items() if replayed[p] or p == EAGER}
            times.append(row | {path: round(statistics.median(t), 4) for path, t in ran.items()})
    found: dict[str, Any] = {"booted_s": round(booted_s, 1), "times": times}
    if backend == BREAKABLE:
        runner.prefill_cuda_graph_runner = runner.eager_runner
        found["sliced"] = sliced(runner, model.SHAPES[shape].vocab)
    print(MARK + json.dumps(found), flush=True)
    os._exit(0)  # skips the distributed teardown, which a lone process does not need


def timed(runner: Any, lens: Sequence[int], rng: random.Random, vocabulary: int) -> tuple[float, bool]:
    """Run one forward pass; return its time (ms), and True if a graph ran it."""
    import torch

    from benchmark.rig import runner as rig

    rig.clear(runner)
    reqs = [rig.request(str(i), [rng.randrange(10, vocabulary) for _ in range(n)]) for i, n in enumerate(lens)]
    batch = rig.forward_batch(runner, reqs)
    rig.synchronize(runner)
    begin = time.perf_counter()
    with torch.no_grad():
        output = runner.forward(batch)
    rig.synchronize(runner)
    return (time.perf_counter() - begin) * 1e3, bool(output.can_run_graph)


def sliced(runner: Any, vocabulary: int) -> list[dict[str, Any]]:
    """Run a long batch whole, and cut after every k layers with a short batch in each pause; return the distances of
    logits."""
    import torch
    from sglang_laps.slices import Slices

    from benchmark.rig import runner as rig

    rng = random.Random(1)
    ids = [rng.randrange(10, vocabulary) for _ in range(SLICED_TOKENS)]
    short = [rng.randrange(10, vocabulary) for _ in range(64)]
    rig.clear(runner)
    whole = rig.prefill(runner, [rig.request("long", ids)])
    rig.clear(runner)
    alone = rig.prefill(runner, [rig.request("short", short)])
    cutter = Slices(runner)
    found = []
    for layers in (1, 3, 7):
        rig.clear(runner)
        met: list[Any] = []

        def pause(left: float, met: list[Any] = met) -> bool:
            met.append(rig.prefill(runner, [rig.request(f"short {left}", short)]))
            return True

        begin = time.perf_counter()
        with torch.no_grad(), cutter.cut(layers, pause):
            turn = rig.prefill(runner, [rig.request("long", ids)])
        rig.synchronize(runner)
        took_ms = (time.perf_counter() - begin) * 1e3
        found.append({
            "layers": layers, "pauses": len(met), "ms": round(took_ms, 2),
            "long_error": apart(turn.logits, whole.logits), "same_token": turn.tokens == whole.tokens,
            "short_error": max((apart(m.logits, alone.logits) for m in met), default=0.0),
            "same_short_tokens": all(m.tokens == alone.tokens for m in met),
        })  # fmt: skip
    return found


def apart(a: Any, b: Any) -> float:
    """Return the relative distance of two results; NaN if either has one."""
    return float((a - b).norm() / b.norm())


def child(shape: str, backend: str, attention: str) -> dict[str, Any]:
    """Run ``one`` in a process of its own; return {} and print the reason if it failed."""
    words = [sys.executable, "-m", "benchmark.ladder", "--one", shape, backend, "--attention", attention]
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    lines = [x for x in done.stdout.splitlines() if x.startswith(MARK)]
    if not lines:
        print(f"  {shape} {backend} ended with code {done.returncode}:\n" + done.stdout[-3000:], flush=True)
        return {}
    found: dict[str, Any] = json.loads(lines[-1][len(MARK) :])
    return found


def tables(data: dict[str, dict[str, Any]]) -> list[Table]:
    """Return a table of times and one of slices for each shape."""
    made, paths = [], (EAGER, BREAKABLE, FULL)
    for shape, found in data.items():
        at: dict[tuple[int, int], dict[str, Any]] = {}
        for row in (row for backend in found.values() for row in backend.get("times", ())):
            at.setdefault((row["rows"], row["requests"]), {}).update(row)
        rows = []
        for (tokens, requests), row in sorted(at.items()):
            over = f"{row[BREAKABLE] / row[FULL]:.2f}" if row.keys() >= {BREAKABLE, FULL} else "-"
            rows.append((str(tokens), str(requests), *(f"{row[p]:.2f}" if p in row else "-" for p in paths), over))
        heads = ("rows", "requests", *paths, "breakable / full")
        made.append(Table(f"{shape}: ms a forward pass", heads, rows, "Host and device, from call to synchronised."))
        heads = ("layers a slice", "pauses", "long: relative error", "same token", "shorts: largest error", "same")
        cuts = [
            (
                str(c["layers"]), str(c["pauses"]), f"{c['long_error']:.2g}", str(c["same_token"]),
                f"{c['short_error']:.2g}", str(c["same_short_tokens"]),
            )
            for c in found.get(BREAKABLE, {}).get("sliced", ())
        ]  # fmt: skip
        note = f"Logits of {SLICED_TOKENS} tokens in slices, 64 other tokens in each pause, against the whole pass."
        made.append(Table(f"{shape}: slices", heads, cuts, note))
    return made


def figures(data: dict[str, dict[str, Any]]) -> list[Figure]:
    """Return the largest change of results by slices."""
    cuts = [c for found in data.values() for c in found.get(BREAKABLE, {}).get("sliced", ())]
    worst = max((max(c["long_error"], c["short_error"]) for c in cuts), default=None)
    name = "logits in slices against whole, largest relative error"
    return [] if worst is None else [Figure.of(name, worst, SLICED_LOGITS)]


def options(p: Parser) -> None:
    """Add the options of this command."""
    p.add_argument("--emulate", action="store_true", help="tiny model on the CPU")
    p.add_argument("--shapes", nargs="+", default=["0.5B", "7B"], choices=["0.5B", "7B", "14B", "32B"])
    p.add_argument("--attention", default="fa3", help="attention backend (on a GPU)")
    p.add_argument("--one", nargs=2, metavar=("SHAPE", "BACKEND"), help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> Iterator[tuple[Piece, Path]]:
    """Yield the piece after each shape: an interrupted run keeps its results so far."""
    if args.one:
        shape, backend = args.one
        one(shape, backend, args.attention)
    shapes, backends = (["tiny"], [BREAKABLE]) if args.emulate else (args.shapes, [BREAKABLE, FULL])
    data: dict[str, dict[str, Any]] = {}
    text = "One prefill batch at a time, new tokens only, requests of equal lengths; weights are dummies."
    for shape in shapes:
        for backend in backends:
            args.say(f"{shape} {backend}")
            data.setdefault(shape, {})[backend] = child(shape, backend, args.attention)
        yield Piece("ladder", "Row counts", text, 0, tables(data), figures(data), data=data), args.out


COMMAND = Command("benchmark.ladder", __doc__, run, options, out="ladder", every=True)

if __name__ == "__main__":
    sys.exit(COMMAND.main())
