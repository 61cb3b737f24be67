"""Servers that prefill and decode: LAPS against stock SGLang, on this machine.

    python -m benchmark.colocated [--rounds 3] [--streams 8] [--longs 3] [--shorts 12] [--tbt-ms MS]

Streams are decoded while long and short prompts come, the same for each variant, in turns: LAPS; stock with small
chunks, a decode step between two of them and the shortest prompt first; and stock as it is. All three compute attention
for new tokens alone, as devices do (``rig/rows``).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from benchmark.results.metrics import quantile
from benchmark.results.rounds import in_turns, ratio
from benchmark.rig import model, servers
from benchmark.rig.progress import Progress

SHAPE = model.Shape(hidden=32, layers=24, heads=1, kv_heads=1, intermediate=2560, context=16384)
ROWS = model.REPO / "benchmark" / "rig" / "rows"
LAPS, BEST, DEFAULT = "laps", "stock-512-interval-1-spf", "stock"
LARGE = ("--chunked-prefill-size", "4096")
SMALL = ("--chunked-prefill-size", "512", "--prefill-decode-interval", "1")
VARIANTS = {
    LAPS: (*LARGE, "--enable-laps-scheduler"),
    BEST: (*SMALL, "--schedule-policy", "shortest-prefill-first"),
    DEFAULT: LARGE,
}
FIGURES = ("tbt_p50", "tbt_p99", "tbt_longest", "short_p90", "ttft_mean", "long_p90", "requests_per_s")
"""In seconds, but for the last."""


@dataclass
class Request:
    """One request, and when each of its tokens came (seconds of one clock)."""

    kind: str
    prompt: list[int]
    new: int
    at_s: float
    sent_s: float = 0.0
    came_s: list[float] = field(default_factory=list)

    async def run(self, http: aiohttp.ClientSession, url: str, begin_s: float) -> None:
        """Ask when its time has come, and read to the end."""
        await asyncio.sleep(max(0.0, begin_s + self.at_s - time.perf_counter()))
        self.sent_s = time.perf_counter()
        sampling = {"max_new_tokens": self.new, "temperature": 0, "ignore_eos": True}
        body = {"input_ids": self.prompt, "stream": True, "sampling_params": sampling}
        async with http.post(url + "/generate", json=body) as reply:
            async for line in reply.content:
                if line.startswith(b"data: {"):
                    came = len(json.loads(line[6:])["output_ids"])
                    self.came_s += [time.perf_counter()] * (came - len(self.came_s))
        if len(self.came_s) != self.new:
            raise RuntimeError(f"{len(self.came_s)} tokens of {self.new} came")


def load(seed: int, args: argparse.Namespace) -> list[Request]:
    """Streams that begin first, then long and short prompts."""
    rng = random.Random(seed)

    def request(kind: str, low: int, high: int, new: int, at_s: float) -> Request:
        return Request(kind, [rng.randrange(*model.VOCABULARY) for _ in range(rng.randint(low, high))], new, at_s)

    span_s = args.seconds
    streams = [request("stream", 20, 200, rng.randint(60, 120), rng.random()) for _ in range(args.streams)]
    longs = [request("long", 3000, 6000, 8, 1.0 + span_s * rng.random()) for _ in range(args.longs)]
    return [*streams, *longs, *(request("short", 10, 256, 8, 1.0 + span_s * rng.random()) for _ in range(args.shorts))]


async def serve(url: str, requests: Sequence[Request]) -> float:
    """Seconds from the first request to the last token."""
    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector, read_bufsize=1 << 22) as http:
        begin_s = time.perf_counter()
        await asyncio.gather(*(r.run(http, url, begin_s) for r in requests))
        return time.perf_counter() - begin_s


def figures(requests: Sequence[Request], seconds: float) -> dict[str, float]:
    """FIGURES of one round."""
    gaps = [b - a for r in requests if r.kind == "stream" for a, b in zip(r.came_s, r.came_s[1:], strict=False)]
    waits = {kind: [r.came_s[0] - r.sent_s for r in requests if r.kind == kind] for kind in ("short", "long")}
    return {
        "tbt_p50": quantile(gaps, 50),
        "tbt_p99": quantile(gaps, 99),
        "tbt_longest": max(gaps),
        "short_p90": quantile(waits["short"], 90),
        "ttft_mean": statistics.mean([*waits["short"], *waits["long"]]),
        "long_p90": quantile(waits["long"], 90),
        "requests_per_s": len(requests) / seconds,
    }


def server(name: str, folder: Path, args: argparse.Namespace) -> servers.Server:
    """One variant, not started."""
    flags = [*VARIANTS[name], "--max-total-tokens", "65536", *args.server]
    if name == LAPS and args.tbt_ms is not None:
        flags += ["--laps-tbt-ms", str(args.tbt_ms)]
    path = os.pathsep.join(filter(None, (str(ROWS), os.environ.get("PYTHONPATH"))))
    made = model.make(folder / "models", SHAPE)
    return servers.colocated(made, folder / f"{name}.log", *flags, env={"PYTHONPATH": path}, name=name)


def main(argv: Sequence[str] | None = None) -> None:
    """Run it; print the table, and write all rounds to a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for flag, default in (("rounds", 3), ("streams", 8), ("longs", 3), ("shorts", 12)):
        parser.add_argument(f"--{flag}", type=int, default=default)
    parser.add_argument("--seconds", type=float, default=12.0, help="prompts come within this time")
    parser.add_argument("--tbt-ms", type=float, help="--laps-tbt-ms (default: derived)")
    parser.add_argument("--server", nargs="*", default=[], help="further flags of each server")
    parser.add_argument("--out", type=Path, default=Path("out/colocated"))
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    running = {name: server(name, args.out, args) for name in VARIANTS}
    say = Progress()
    with servers.running(*running.values(), say=say):

        def once(i: int, name: str) -> dict[str, float]:
            requests = load(i, args)
            seen = figures(requests, asyncio.run(serve(running[name].url, requests)))
            say(f"{name}: {json.dumps(seen)}")
            return seen

        for name in running:
            say(f"warming up {name}")
            asyncio.run(serve(running[name].url, load(-1, args)[: args.streams // 2 + 1]))
        rounds = in_turns(tuple(VARIANTS), args.rounds, once, say)
        decode = running[LAPS].laps_status()["decode"]
    (args.out / "rounds.json").write_text(json.dumps({"rounds": rounds, "decode": decode}, indent=1))
    print("| server | " + " | ".join(FIGURES) + " |\n|" + " --- |" * (len(FIGURES) + 1))
    for name, seen in rounds.items():
        print(f"| {name} | " + " | ".join(f"{statistics.median(r[f] for r in seen):.3f}" for f in FIGURES) + " |")
    for base in (BEST, DEFAULT):
        over = (ratio([r[f] for r in rounds[LAPS]], [r[f] for r in rounds[base]]) for f in FIGURES)
        print(f"| laps over {base} | " + " | ".join(map(str, over)) + " |")
    print(f"decode steps of {LAPS}: {json.dumps(decode)}")


if __name__ == "__main__":
    main()
