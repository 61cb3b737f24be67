"""Mixed load for an hour through the real router, two prefill servers (one with HiCache) and a decode server.

    ./run bench soak                     # an hour
    ./run bench soak --minutes 15        # a short one

Exit code 1 if the memory of any process at the end is more than 5% above its memory after the run-in (ten minutes); the
processes are named. The load is light, so other work can run at the same time.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from benchmark.results.command import one_line_errors, parser, positive
from benchmark.results.piece import Figure, Piece, Table
from benchmark.rig import devices, model, servers
from benchmark.rig.devices import MODELS
from benchmark.rig.progress import Progress
from soak import memory
from soak.load import Load
from soak.memory import MAX_RATIO, Growth, Record

SHAPE = model.Shape(hidden=64, layers=4, heads=2, kv_heads=1, intermediate=176)
"""Small model whose KV fills in seconds and whose chunks take some milliseconds."""
POOL, HOST_RATIO = 16384, 2
"""KV tokens of each server, and HiCache's host memory as a multiple of these tokens."""
TOKENS = ("--max-total-tokens", str(POOL), "--context-length", "8192")
LAPS = ("--enable-laps-scheduler", "--chunked-prefill-size", "512", *TOKENS)
HICACHE = (
    "--enable-hierarchical-cache", "--hicache-ratio", str(HOST_RATIO), "--hicache-io-backend", "direct",
    "--hicache-mem-layout", "layer_first", "--hicache-write-policy", "write_through",
)  # fmt: skip
HOST_COPIES = Path(__file__).parents[1] / "hicache"
"""Plugin that copies between device and host without a GPU."""
NORMAL_LOOP = ("--disable-overlap-schedule",)
"""Arguments of one prefill server and the decode server; the other prefill server runs SGLang's overlap loop."""
ENV = {"OMP_NUM_THREADS": "1"}
FILL_TOKENS = 2 * 2 * POOL * (1 + HOST_RATIO)
"""Tokens sent before the measurement: twice the device and host capacity of two prefill servers."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the soak; return 0 if no process grew and every request was served."""
    p = parser("./run bench soak", __doc__, "soak", seed=1)
    p.add_argument("--minutes", type=positive, default=60.0, help="duration of the load (60)")
    p.add_argument("--run-in", type=positive, default=10.0, metavar="MINUTES", help="time before measuring (10)")
    p.add_argument("--rate", type=positive, default=3.0, help="requests/s (3)")
    args = p.parse_args(argv)
    if args.minutes < args.run_in + 2 * memory.WINDOW_S / 60.0:
        p.error(f"--minutes {args.minutes:g} ends less than two minutes after the run-in of {args.run_in:g}")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
    say = Progress(live=True)
    with one_line_errors("bench soak"):
        say("making the model")
        folder, logs = model.make(MODELS, SHAPE), args.out / "logs"
        hicache = devices.with_path(ENV, HOST_COPIES)
        first = servers.prefill(folder, logs / "prefill-0.log", *LAPS, *NORMAL_LOOP, env=ENV, name="prefill")
        second = servers.prefill(
            folder, logs / "prefill-1.log", *LAPS, *HICACHE, env=hicache, name="prefill with HiCache"
        )
        decode = servers.decode(folder, logs / "decode.log", *TOKENS, *NORMAL_LOOP, env=ENV, name="decode")
        alloc = ("--enable-laps-alloc", "--laps-tokenizer", str(folder), "--log-level", "warn")
        router = servers.minilb(
            [first, second], [decode], logs / "router.log", *alloc, module="sglang_router_laps.launch_router"
        )
        try:
            with servers.running(first, second, decode, say=say), servers.running(router, say=say):
                piece = asyncio.run(_run_soak(args, (first, second, decode, router), say))
        finally:
            say.done()
    piece.save_and_print(args.out, "./run bench soak", argv, every=True)
    missed = [*piece.data["grown"], *piece.data["wrong"][:12]]
    print(*(f"bench soak: {line}" for line in missed), sep="\n", end="\n" if missed else "", file=sys.stderr)
    return 1 if any(f.met is False for f in piece.figures) else 0


async def _run_soak(args: argparse.Namespace, up: Sequence[servers.Server], say: Progress) -> Piece:
    load, end_s = Load(up[-1].port, args.seed, args.rate), 60.0 * args.minutes
    say("filling the caches")
    await load.fill(FILL_TOKENS)
    record = Record(processes(up))
    begin = time.monotonic()
    running = asyncio.ensure_future(load.run(lambda: time.monotonic() - begin >= end_s))
    for at_s in memory.sample_times(end_s):
        while (left := begin + at_s - time.monotonic()) > 0:
            say(f"{at_s / 60:.0f} of {args.minutes:g} minutes; {load.sent} requests")
            await asyncio.sleep(min(left, 5.0))
        record.take_samples(at_s)
    await running
    return make_piece(args, load, record)


def processes(up: Sequence[servers.Server]) -> dict[str, psutil.Process]:
    """Return all processes of these servers, under unique names."""
    found: dict[str, psutil.Process] = {}
    for server in up:
        for p in server.family():
            name = memory.process_name(p, server.name, bool(server.process and p.pid == server.process.pid))
            found[name if name not in found else f"{name} {p.pid}"] = p
    return found


def make_piece(args: argparse.Namespace, load: Load, record: Record) -> Piece:
    """Return the piece for the report."""
    grown = record.growth(60.0 * args.run_in, 60.0 * args.minutes)
    bad = sum(load.ends[end] for end in ("failed", "hung"))
    figures = [_make_figure(g) for g in grown]
    return Piece(
        name="soak",
        title="Memory under load that lasts",
        text="Mixed load (conversations, long prompts, public traces; streams, aborts, clients that leave) through the "
        "real router, two real prefill servers (one with HiCache) and a decode server. Memory is what is resident "
        "and of no file, shared pages divided among those that share them (PSS): at the end over after the run-in, "
        "medians of a minute.",
        seed=args.seed,
        tables=[_make_table(grown, record, args.minutes)],
        figures=[
            *figures, Figure("requests that failed", float(bad), "0", bad == 0),
            Figure("requests", float(load.sent)), Figure("cores kept busy", record.cores()),
        ],
        data={
            "settings": {"minutes": args.minutes, "run_in": args.run_in, "rate": args.rate},
            "ends": dict(load.ends), "wrong": load.wrong, "grown": [str(g) for g in grown if not g.acceptable],
            "samples": record.raw(),
        },
    )  # fmt: skip


def _make_figure(g: Growth) -> Figure:
    return Figure(
        f"memory of {g.name}", float("nan") if g.ratio is None else g.ratio, f"<= {MAX_RATIO:g}", g.acceptable
    )


def _make_table(grown: Sequence[Growth], record: Record, minutes: float) -> Table:
    rows: list[Sequence[str]] = []
    for g in grown:
        some = record.samples[g.name]
        ends = [f"{x / 1024:.1f}" if x is not None else "-" for x in (g.before, g.after)]
        more = ["-", "-"]
        if some:
            more = [f"{some[0].threads} to {some[-1].threads}", f"{some[0].descriptors} to {some[-1].descriptors}"]
        rows.append((g.name, *ends, "-" if g.ratio is None else f"{g.ratio - 1:+.1%}", *more))
    heads = ("process", "MiB after the run-in", "MiB at the end", "change", "threads", "descriptors")
    return Table("Memory of each process", heads, rows, f"{minutes:g} minutes of load")


if __name__ == "__main__":
    sys.exit(main())
