"""Times of one prefill batch per row count on each of SGLang's own paths.

The paths: eager, breakable graphs (SGLang's default), and full graphs with a ladder of row counts and 64 request slots.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmark.results import Piece, Table
from benchmark.rig import model

ROWS = (8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
REQUESTS = (1, 4, 16, 64)
SLOTS = 64
REPEATS = 15
EAGER, BREAKABLE, FULL = PATHS = "eager", "breakable", "full"
TINY = "tiny"
"""Shape for a machine without a GPU: runs the eager path only, and says nothing about gains."""
MARK = "LADDER "


def flags(shape: str, backend: str) -> list[str]:
    if shape == TINY:
        return ["--device", "cpu", "--dtype", "float32", "--max-total-tokens", "8192", "--chunked-prefill-size", "4096"]
    graph: dict[str, Any] = {"backend": backend, "bs": list(ROWS), "max_bs": ROWS[-1]}
    if backend == FULL:
        graph["full_prefill_max_req"] = SLOTS
    return [
        "--dtype", "bfloat16", "--attention-backend", "fa3", "--mem-fraction-static", "0.7", "--max-total-tokens",
        "65536", "--max-running-requests", "128", "--chunked-prefill-size", "8192",
        "--cuda-graph-config", json.dumps({"prefill": graph, "decode": {"backend": "disabled"}}),
    ]  # fmt: skip


def time_path(shape: str, backend: str) -> None:
    """Time every batch on this path, for breakable graphs also on the eager path; print one line. Ends the process."""
    from benchmark.rig import runner as rig

    with tempfile.TemporaryDirectory() as folder:
        runner = rig.boot(model.write_shape(shape, Path(folder)), *flags(shape, backend))
    rng, stock, eager = random.Random(0), runner.prefill_cuda_graph_runner, {EAGER: runner.eager_runner}
    paths = eager if shape == TINY else {FULL: stock} if backend == FULL else {BREAKABLE: stock, **eager}
    times = []
    for rows in ROWS:
        for count in (c for c in REQUESTS if c <= rows):
            lens = [rows // count + (i < rows % count) for i in range(count)]
            seen: dict[str, list[float]] = {path: [] for path in paths}
            replayed = {}
            for _ in range(3 if shape == TINY else REPEATS):
                for path, front in paths.items():
                    runner.prefill_cuda_graph_runner = front
                    ms, replayed[path] = timed(runner, lens, rng, model.SHAPES[shape].vocab)
                    seen[path].append(ms)
            ran = {p: t[2:] for p, t in seen.items() if replayed[p] or p == EAGER}
            medians = {path: round(statistics.median(t), 4) for path, t in ran.items()}
            times.append({"rows": rows, "requests": count, **medians})
    print(MARK + json.dumps(times), flush=True)
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


def ladder(shape: str) -> Piece:
    """Measure all paths of one shape, in child processes. Raises ChildProcessError if a child fails."""
    times: list[dict[str, Any]] = []
    for backend in (BREAKABLE,) if shape == TINY else (BREAKABLE, FULL):
        words = [sys.executable, "-m", "benchmark.gpu.ladder", shape, backend]
        done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        lines = [x for x in done.stdout.splitlines() if x.startswith(MARK)]
        if not lines:
            raise ChildProcessError(f"{shape} {backend} ended with code {done.returncode}: {done.stdout[-200:]}")
        times += json.loads(lines[-1][len(MARK) :])
    text = "One prefill batch at a time, new tokens only, requests of equal lengths; weights are dummies."
    return Piece("ladder", f"Row counts, {shape}", text, 0, [table(shape, times)], data={"times": times})


def table(shape: str, times: Sequence[dict[str, Any]]) -> Table:
    """Return a row for each batch, with the time on each path."""
    at: dict[tuple[int, int], dict[str, Any]] = {}
    for row in times:
        at.setdefault((row["rows"], row["requests"]), {}).update(row)
    rows = []
    for (tokens, requests), row in sorted(at.items()):
        over = f"{row[BREAKABLE] / row[FULL]:.2f}" if row.keys() >= {BREAKABLE, FULL} else "-"
        rows.append((str(tokens), str(requests), *(f"{row[p]:.2f}" if p in row else "-" for p in PATHS), over))
    heads = ("rows", "requests", *PATHS, "breakable / full")
    return Table(f"{shape}: ms a forward pass", heads, rows, "Host and device, from call to synchronised.")


if __name__ == "__main__":
    time_path(*sys.argv[1:])
