"""Check of this client against SGLang's own ``bench_serving``: the same closed load on the same server, in turns."""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
from pathlib import Path

from laps_plan.traffic.job import Job

from benchmark.load.prompts import Prompts
from benchmark.results import Figure, Piece, Table, in_turns, ratio
from benchmark.results.bars import SAME_CLIENT
from benchmark.rig.fleet import Fleet
from benchmark.rig.servers import ENV, FAKE_BOOTSTRAP_HOST, ServerError
from benchmark.rig.variants import BUILT_IN, FCFS
from benchmark.serve.compare import closed_loop

TOKENS, CLIENTS = 1024, 4
OURS, THEIRS = "this client", "bench_serving"


def bench_serving(url: str, folder: Path, model: Path, requests: int, seed: int) -> float:
    """Return the median TTFT (ms) measured by SGLang's client. Raises ServerError."""
    result = folder / "bench_serving.jsonl"
    result.unlink(missing_ok=True)
    fake = {"bootstrap_host": FAKE_BOOTSTRAP_HOST, "bootstrap_port": 1, "bootstrap_room": seed}
    command = (
        sys.executable, "-m", "sglang.benchmark.serving", "--backend", "sglang", "--base-url", url,
        "--model", str(model), "--tokenizer", str(model), "--dataset-name", "random-ids", "--tokenize-prompt",
        "--random-input-len", str(TOKENS), "--random-output-len", "1", "--random-range-ratio", "1.0",
        "--num-prompts", str(requests), "--max-concurrency", str(CLIENTS), "--seed", str(seed), "--disable-tqdm",
        "--extra-request-body", json.dumps(fake), "--output-file", str(result),
    )  # fmt: skip
    with (folder / "bench_serving.log").open("w") as log:
        code = subprocess.run(command, stdout=log, stderr=log, env={**os.environ, **ENV}, check=False).returncode
    if code or not result.exists():
        raise ServerError(f"bench_serving ended with code {code}; its log: {log.name}")
    return float(json.loads(result.read_text().splitlines()[-1])["median_ttft_ms"])


def run(args: argparse.Namespace, out: Path) -> Piece:
    """Run both clients on stock fcfs; ``args`` as for ``benchmark.serve``. Raises ServerError or ConnectionError."""
    device, seed, rounds = args.device, args.seed, args.rounds
    out.mkdir(parents=True, exist_ok=True)
    prompts = Prompts(device.vocabulary, seed, device.longest)
    requests = 0

    def once(i: int, name: str) -> float:
        nonlocal requests
        if name == OURS:
            bodies = prompts.bodies([Job(0.0, TOKENS)] * 200, seed + i)
            ttft_s = closed_loop(target, bodies, CLIENTS, args.seconds, 0.3).ttft_s
            requests = max(20, len(ttft_s))
            return 1e3 * statistics.median(ttft_s)
        return bench_serving(target.url, out, model, requests, random.Random(seed + i).getrandbits(30))

    with Fleet(device, [BUILT_IN[FCFS]], prompts, out, args.say) as fleet:
        target, model = fleet.target(FCFS), device.checkpoint()
        seen = in_turns((OURS, THEIRS), rounds, once, args.say)
    figure = Figure.of(f"median TTFT, {OURS} / {THEIRS}", ratio(seen[OURS], seen[THEIRS]), SAME_CLIENT)
    rows = [(name, *(f"{v:.1f}" for v in values)) for name, values in seen.items()]
    heads = ("median TTFT (ms)", *(f"round {i + 1}" for i in range(rounds)))
    text = f"Closed loop of {CLIENTS} clients with prompts of {TOKENS} tokens on one server (stock fcfs), in turns."
    return Piece(
        "client-check", "The client against SGLang's bench_serving", text, seed,
        [Table("Median TTFT (ms) as each client sees it", heads, rows)], [figure],
        data={"median_ttft_ms": seen, "requests": requests},
    )  # fmt: skip
