"""CPU cost of a scheduling round by the length of the waiting queue: LAPS against stock ``fcfs``.

    python -m benchmark.rounds_cost [--lengths 10,100,1000,10000,100000] [--rounds 5] [--out out/rounds-cost]

Each variant is SGLang's own prefill scheduler in a process of its own; only its event loop is ours. The queue is filled
to a length and kept there. A round is the work of the loop to find its next batch
(``get_next_disagg_prefill_batch_to_run``), in CPU time of the scheduler's thread; the batch then really runs, untimed.
Nine of ten requests are short. Stock orders by arrival; both see the same queue.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmark.results import Command, Comparison, Figure, Parser, Piece, Table, count, in_turns
from benchmark.rig import model, servers
from benchmark.rig.devices import MODELS

LENGTHS = (10, 100, 1000, 10_000, 100_000)
VARIANTS: dict[str, dict[str, str]] = {"fcfs": {}, "laps": {"SGLANG_LAPS_SCHEDULER": "{}"}}
"""Environment of each variant; both run under --schedule-policy fcfs."""
SHAPE = model.Shape(hidden=64, layers=2, heads=2, kv_heads=1, intermediate=176)
CHUNK, SHORT_TOKENS, LONG_TOKENS, LONG_SHARE = 1024, (16, 128), 2048, 0.1
TIMED = 24
"""Batches timed at each length."""
LIMIT_S = 400.0


def arguments(checkpoint: Path, port: int, longest: int) -> list[str]:
    """Return SGLang's command line. A prefill server lets at most twice its running requests wait for the scheduler."""
    return [
        *("--model-path", str(checkpoint), "--disaggregation-mode", "prefill", "--host", servers.HOST),
        *("--disaggregation-bootstrap-port", str(port), "--dtype", "float32", "--disable-overlap-schedule"),
        *("--sampling-backend", "pytorch", "--grammar-backend", "none", "--chunked-prefill-size", str(CHUNK)),
        *("--max-total-tokens", "262144", "--context-length", "4096", "--log-level", "error"),
        *("--max-running-requests", str(max(2048, longest // 2 + 1024))),
        *("--schedule-policy", "fcfs"),
    ]


def request(rng: random.Random, i: int) -> Any:
    """Return a tokenized request as SGLang's HTTP process sends it; it needs no decode server."""
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    tokens = LONG_TOKENS if rng.random() < LONG_SHARE else rng.randint(*SHORT_TOKENS)
    return TokenizedGenerateReqInput(
        rid=f"r{i}",
        input_text="",
        input_ids=array("q", rng.choices(range(3, 2000), k=tokens)),
        input_embeds=None,
        mm_inputs=None,
        token_type_ids=None,
        sampling_params=SamplingParams(max_new_tokens=1, temperature=0),
        return_logprob=False,
        logprob_start_len=-1,
        top_logprobs_num=0,
        token_ids_logprob=None,
        stream=False,
        bootstrap_host=servers.FAKE_BOOTSTRAP_HOST,
        bootstrap_port=1,
        bootstrap_room=i,
    )


Rounds = dict[int, list[list[float]]]
"""Queue length -> for each timed round its CPU seconds and the size of its batch."""


def measure(scheduler: Any, lengths: Sequence[int], seed: int) -> Rounds:
    """Fill the queue to each length and time rounds."""
    rng, made, last = random.Random(seed), 0, None
    found: Rounds = {}

    def fill(length: int) -> None:
        nonlocal made
        for _ in range(length - len(scheduler.waiting_queue)):
            made += 1
            scheduler.handle_generate_request(request(rng, made))
        scheduler.waiting_queue.extend(scheduler.disagg_prefill_bootstrap_queue.pop_bootstrapped())

    for length in lengths:
        times = found[length] = []
        # The first rounds classify the requests of the filling, which a server meets one by one.
        for timed in (*[False] * 4, *[True] * TIMED):
            fill(length)
            if len(scheduler.waiting_queue) < length:
                raise SystemExit(f"{len(scheduler.waiting_queue)} of {length} requests wait")
            begin = time.thread_time()
            plan = scheduler.get_next_disagg_prefill_batch_to_run(
                running_batch=scheduler.running_batch, last_batch=last
            )
            took = time.thread_time() - begin
            scheduler.running_batch, last = plan.running_batch, plan.batch_to_run
            if last is not None:
                scheduler.process_batch_result(last, scheduler.run_batch(last))
                if timed:
                    times.append([took, len(last.reqs)])
            scheduler.process_disagg_prefill_inflight_queue()
            if last is None:
                time.sleep(0.001)
    return found


def child(variant: str, lengths: Sequence[int], seed: int) -> None:
    """Run as one scheduler process; print a line of JSON and end the process."""
    from sglang.srt.managers import scheduler as module
    from sglang.srt.managers.disagg_service import start_disagg_service
    from sglang.srt.plugins import load_plugins
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import PortArgs, prepare_server_args

    load_plugins()  # after the scheduler module, as in SGLang's own processes
    args = prepare_server_args(arguments(model.make(MODELS, SHAPE), servers.free_port(), max(lengths)))
    publish(args, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    keep = start_disagg_service()
    scheduler = module.Scheduler(args, PortArgs.init_new(args))
    if (variant == "laps") != bool(getattr(scheduler, "laps", None)):
        raise SystemExit(f"{variant}: LAPS is {'off' if variant == 'laps' else 'on'}")
    found = measure(scheduler, lengths, seed)
    print("\n" + json.dumps({str(n): times for n, times in found.items()}), flush=True)
    del keep
    # Transfer and watchdog threads do not end by themselves.
    os._exit(0)


def spawn(variant: str, lengths: Sequence[int], seed: int) -> Rounds:
    """Run ``child`` and return its rounds. Raises SystemExit with one line if it fails."""
    asked = [sys.executable, "-m", "benchmark.rounds_cost", "--child", variant, "--seed", str(seed)]
    asked += ["--lengths", ",".join(map(str, lengths))]
    env = {**os.environ, **servers.ENV, "OMP_NUM_THREADS": "1", **VARIANTS[variant]}
    try:
        done = subprocess.run(asked, env=env, cwd=model.REPO, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        raise SystemExit(f"{variant}: no result within {LIMIT_S:.0f} s") from None
    if done.returncode:
        raise SystemExit(f"{variant}: {(done.stderr.strip().splitlines() or ['no reason given'])[-1]}")
    return {int(n): times for n, times in json.loads(done.stdout.strip().splitlines()[-1]).items()}


def lengths(text: str) -> list[int]:
    """Return the whole numbers >= 1 in ``text``, in order."""
    return sorted({count(n) for n in text.split(",")})


def options(p: Parser) -> None:
    """Add the options of this command."""
    default = ",".join(map(str, LENGTHS))
    p.add_argument("--lengths", type=lengths, default=default, help="queue lengths, separated by commas")
    p.add_argument("--child", choices=tuple(VARIANTS), help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> Piece:
    """Run processes of both variants, in turns."""
    if args.child:
        child(args.child, args.lengths, args.seed)
    model.make(MODELS, SHAPE)

    def once(i: int, variant: str) -> dict[str, dict[str, float]]:
        found = spawn(variant, args.lengths, args.seed + i)
        return {
            str(n): {"s": statistics.median(s for s, _ in x), "batch": statistics.mean(b for _, b in x)}
            for n, x in found.items()
        }

    seen = Comparison(in_turns(tuple(VARIANTS), args.rounds, once, args.say))
    lengths = [str(n) for n in args.lengths]
    first, last = lengths[0], lengths[-1]
    rows, figures = [], []
    for n in lengths:
        r = seen.ratio("laps", "fcfs", n, "s")
        took = [f"{1e3 * seen.median(v, n, 's'):.2f}" for v in VARIANTS]
        held = [f"{statistics.mean(seen.values(v, n, 'batch')):.0f}" for v in VARIANTS]
        rows.append([f"{int(n):,}", *took, str(r), r.verdict, *held])
        figures.append(Figure.of(f"CPU time of a round, laps / fcfs, {int(n):,} waiting", r))
    for v in VARIANTS:
        growth = seen.median(v, last, "s") / seen.median(v, first, "s")
        figures.append(Figure(f"a round with {int(last):,} waiting over one with {int(first):,}, {v}", growth))
    columns = ["waiting", *VARIANTS, "laps / fcfs", "shown", *(f"batch {v}" for v in VARIANTS)]
    text = (
        "CPU time of SGLang's scheduler thread to find its next batch, the waiting queue kept at a length; 90% of "
        f"{SHORT_TOKENS[0]} to {SHORT_TOKENS[1]} tokens, 10% of {LONG_TOKENS}, chunks of {CHUNK}. Medians of {TIMED} "
        f"rounds in each of {args.rounds} processes of a variant, in turns. Batch: requests a round admits, each of "
        "which costs its share; a batch of shorts holds more of them than one that begins with a long prompt."
    )
    table = Table("CPU time of one round (ms)", columns, rows)
    data = {"seconds": {v: {n: seen.values(v, n, "s") for n in lengths} for v in VARIANTS}}
    title = "What a scheduling round costs by the length of the queue"
    return Piece("rounds-cost", title, text, args.seed, [table], figures, data=data)


COMMAND = Command("benchmark.rounds_cost", __doc__, run, options, out="rounds-cost", rounds=5, seed=1, every=True)
main = COMMAND.main

if __name__ == "__main__":
    sys.exit(main())
