"""Servers that prefill and decode: LAPS against stock SGLang, on this machine.

    ./run bench colocated [--rounds 3] [--streams 8] [--longs 3] [--shorts 12] [--tbt-ms MS]
    ./run bench colocated --device emulated:h200-qwen3-8b,slow=4

Streams are decoded while long and short prompts arrive. The servers run the same load in turns: LAPS, stock SGLang as
it is, and stock SGLang with the shortest prompt first and small chunks, which alternate or mix with decode steps. All
servers compute attention for new tokens only, as devices do (``rig/rows``). In each figure, LAPS is compared with the
best of the stock settings whose streams, as measured, wait no longer than those of LAPS.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

import aiohttp
from laps_core.policy.decode import LEAST_TARGET_S

from benchmark.results import Column, Command, Comparison, Parser, Piece, bars, count, positive, quantile, take_turns
from benchmark.rig import CPU, MODELS, ON, SPF, Device, Variant, add_device, model, servers, with_path

SHAPE = model.Shape(hidden=32, layers=24, heads=1, kv_heads=1, intermediate=2560, context=16384)
OURS = f"A {SHAPE.layers}-layer Qwen2 on this machine's cores; attention is computed for new tokens alone"
ROWS = model.REPO / "benchmark" / "rig" / "rows"
LAPS, DEFAULT = "laps", "stock"


BETWEEN = f"--schedule-policy {SPF} --prefill-decode-interval 1"
VARIANTS = {
    name: ("--chunked-prefill-size", *words.split())
    for name, words in {
        LAPS: f"4096 {ON}",
        DEFAULT: "4096",
        **{f"stock, {n}, a step between": f"{n} {BETWEEN}" for n in (512, 2048)},
        "stock, 1024, mixed": f"1024 --schedule-policy {SPF} --enable-mixed-chunk",
    }.items()
}
PATIENCE_S = 120.0
"""Longest wait for the next token of a request, the first token included (seconds)."""
NAMES = {
    "tbt_p50": "between tokens, P50", "tbt_p99": "between tokens, P99", "tbt_longest": "between tokens, longest",
    "short_p90": "short P90", "ttft_mean": "mean TTFT", "long_p90": "long P90", "requests_per_s": "requests/s",
}  # fmt: skip
"""Figures of a round, and their names in tables. All are in seconds, except requests/s."""
RATE = "requests_per_s"
COLUMNS = tuple(
    Column(words, (key,), ".2f") if key == RATE else Column(words, (key,), scale=1e3) for key, words in NAMES.items()
)


@dataclass
class Request:
    """One request, and the arrival times of its tokens (seconds of one clock)."""

    kind: str
    prompt: list[int]
    new: int
    at_s: float
    sent_s: float = 0.0
    came_s: list[float] = field(default_factory=list)

    async def run(self, http: aiohttp.ClientSession, url: str, begin_s: float) -> None:
        """Send the request at its time and read the whole answer. Raises ConnectionError."""
        await asyncio.sleep(max(0.0, begin_s + self.at_s - time.perf_counter()))
        self.sent_s = time.perf_counter()
        sampling = {"max_new_tokens": self.new, "temperature": 0, "ignore_eos": True}
        body = {"input_ids": self.prompt, "stream": True, "sampling_params": sampling}
        try:
            async with http.post(url + "/generate", json=body) as reply:
                async for line in reply.content:
                    if line.startswith(b"data: {"):
                        came = len(json.loads(line[6:]).get("output_ids", ()))
                        self.came_s += [time.perf_counter()] * (came - len(self.came_s))
        except aiohttp.ClientError as e:
            raise ConnectionError(f"{url}: {e or type(e).__name__}") from None
        if len(self.came_s) != self.new:
            raise ConnectionError(f"{url}: {len(self.came_s)} tokens of {self.new} came")


Round = tuple[list[Request], float]
"""One round: its answered requests, and its duration (seconds)."""


def load(seed: int, args: argparse.Namespace) -> list[Request]:
    """Return streams, which start first, then long and short prompts."""
    rng = random.Random(seed)

    def request(kind: str, low: int, high: int, new: int, at_s: float) -> Request:
        return Request(kind, [rng.randrange(*model.VOCABULARY) for _ in range(rng.randint(low, high))], new, at_s)

    def later() -> float:
        return 1.0 + args.seconds * rng.random()

    streams = [request("stream", 20, 200, rng.randint(60, 120), rng.random()) for _ in range(args.streams)]
    longs = [request("long", 3000, 6000, 8, later()) for _ in range(args.longs)]
    return [*streams, *longs, *(request("short", 10, 256, 8, later()) for _ in range(args.shorts))]


async def serve(url: str, requests: Sequence[Request]) -> float:
    """Send all requests; return the seconds until the last token. Raises ConnectionError, also if a server hangs."""
    timeout = aiohttp.ClientTimeout(total=None, sock_read=PATIENCE_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector, read_bufsize=1 << 22) as http:
        begin_s = time.perf_counter()
        await asyncio.gather(*(r.run(http, url, begin_s) for r in requests))
        return time.perf_counter() - begin_s


def figures(requests: Sequence[Request], seconds: float) -> dict[str, float]:
    """Return the figures of one round, as in NAMES."""
    gaps = [b - a for r in requests if r.kind == "stream" for a, b in pairwise(r.came_s)]
    short, long = ([r.came_s[0] - r.sent_s for r in requests if r.kind == kind] for kind in ("short", "long"))
    values = (
        quantile(gaps, 50), quantile(gaps, 99), max(gaps), quantile(short, 90), statistics.mean([*short, *long]),
        quantile(long, 90), len(requests) / seconds,
    )  # fmt: skip
    return dict(zip(NAMES, values, strict=True))


def server(name: str, args: argparse.Namespace) -> servers.Server:
    """Return the server of one variant, not started."""
    device: Device = args.device
    tbt_ms = args.tbt_ms
    if device.emulated:
        checkpoint, env, tbt_ms = device.checkpoint(), device.env, tbt_ms or 1e3 * LEAST_TARGET_S * device.slow
        flags = [*device.args_of(Variant(name, VARIANTS[name]))]
    else:
        checkpoint, flags = model.make(MODELS, SHAPE), [*VARIANTS[name], "--max-total-tokens", "65536"]
        env = with_path({}, ROWS)
    if name == LAPS and tbt_ms is not None:
        flags += ["--laps-tbt-ms", str(tbt_ms)]
    return servers.colocated(checkpoint, servers.log_of(args.out, name), *flags, env=env, name=f"server ({name})")


def run_rounds(
    names: Sequence[str], rounds: int, args: argparse.Namespace, warm: tuple[int, int], tokens: int | None = None
) -> tuple[dict[str, list[Round]], dict[str, Any]]:
    """Run all rounds, the servers in turns; return the rounds, and the ``decode`` part of LAPS's status. ``warm``:
    streams and long prompts of a warm-up; ``tokens``: length of each stream. Raises ServerError or ConnectionError."""
    running, say = {name: server(name, args) for name in names}, args.say
    streams, longs = warm
    with servers.running(*running.values(), say=say):
        for name, one in running.items():
            say(f"warming up {name}")
            requests = load(-1, args)
            documents = [replace(r, at_s=0.0) for r in requests if r.kind == "long"][:longs]
            asyncio.run(serve(one.url, [*requests[:streams], *documents]))

        def once(i: int, name: str) -> Round:
            requests = [replace(r, new=tokens or r.new) if r.kind == "stream" else r for r in load(args.seed + i, args)]
            return requests, asyncio.run(serve(running[name].url, requests))

        return take_turns(names, rounds, once, say), running[LAPS].laps_status()["decode"]


class Tokens(NamedTuple):
    """Token times of one round, for a picture, in seconds from the start of the round."""

    streams: list[list[float]]
    """Arrival times of the tokens of each stream."""
    documents: list[tuple[float, float]]
    """Arrival and first-token time of each long prompt."""


def tokens(requests: Sequence[Request]) -> Tokens:
    begin_s = min(r.sent_s - r.at_s for r in requests)
    streams = [[t - begin_s for t in r.came_s] for r in requests if r.kind == "stream"]
    return Tokens(streams, [(r.sent_s - begin_s, r.came_s[0] - begin_s) for r in requests if r.kind == "long"])


def stock_as_smooth(seen: Comparison) -> list[str]:
    """Return the stock settings whose streams wait no longer than those of LAPS (P99 between tokens); if there are
    none, the setting whose streams wait least."""
    stock = {name: seen.median(name, "tbt_p99") for name in seen.rounds if name != LAPS}
    most = max(seen.median(LAPS, "tbt_p99"), min(stock.values()))
    return [name for name, p99 in stock.items() if p99 <= most]


def piece(seen: Comparison, decode: dict[str, Any], seed: int, settings: dict[str, Any]) -> Piece:
    even, target_s = stock_as_smooth(seen), decode["target_ms"] / 1e3
    text = (
        f"{settings['streams']} streams are decoded while {settings['longs']} prompts of 3,000 to 6,000 tokens "
        f"and {settings['shorts']} of 10 to 256 come within {settings['seconds']:g} s, the same for each server, in "
        f"turns. {settings['device']}. The overlap loop. Stock settings with a P99 between tokens no longer than that "
        f"of LAPS, or the shortest: {', '.join(even)}. Medians over rounds, in ms."
    )
    tables = [seen.table("Time between tokens and to the first one (ms)", "server", COLUMNS)]
    data = {**settings, "rounds": seen.rounds, "decode": decode}
    found = Piece("colocated", "Servers that prefill and decode", text, seed, tables, data=data)
    for key, bar in (
        ("short_p90", bars.COLOCATED_SHORT), ("ttft_mean", bars.COLOCATED_MEAN), (RATE, bars.COLOCATED_RATE),
    ):  # fmt: skip
        best = seen.best(even, key, most=key == RATE) or ""
        found.judge(f"{NAMES[key]}, laps / {best} (the best of stock)", seen.ratio(LAPS, best, key), bar)
    for key, bar in (("tbt_p99", bars.COLOCATED_TBT), ("long_p90", bars.COLOCATED_LONG)):
        found.judge(f"{NAMES[key]}, laps / {DEFAULT}", seen.ratio(LAPS, DEFAULT, key), bar)
    for key, bar in (("tbt_p99", bars.COLOCATED_P99), ("tbt_longest", bars.COLOCATED_LONGEST)):
        found.judge(f"{NAMES[key]}, laps / target", seen.median(LAPS, key) / target_s, bar)
    return found


def add_load(p: Parser, streams: int, longs: int, shorts: int) -> None:
    """Add the options of the load, with these defaults."""
    for flag, default in (("streams", streams), ("longs", longs), ("shorts", shorts)):
        p.add_argument(f"--{flag}", type=count, default=default, help=f"({default})")
    words = "--laps-tbt-ms (derived; 50 times as slow on an emulated device)"
    p.add_argument("--tbt-ms", type=positive, help=words)


def options(p: Parser) -> None:
    add_load(p, 8, 3, 12)
    add_device(p, CPU)


def settings(args: argparse.Namespace) -> dict[str, Any]:
    return {key: getattr(args, key) for key in ("streams", "longs", "shorts", "seconds", "tbt_ms")}


def run(args: argparse.Namespace) -> Piece:
    seen, decode = run_rounds(tuple(VARIANTS), args.rounds, args, (args.streams // 2 + 1, 0))
    what = args.device.what[0].upper() + args.device.what[1:] if args.device.emulated else OURS
    rounds = {name: [figures(*one) for one in of] for name, of in seen.items()}
    return piece(Comparison(rounds), decode, args.seed, {**settings(args), "device": what})


COMMAND = Command("./run bench colocated", __doc__, run, options, out="colocated", rounds=3, seed=1, seconds=12.0)

if __name__ == "__main__":
    sys.exit(COMMAND.main())
