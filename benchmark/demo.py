"""The main job, seen: short turns and long documents through a real router, prefill and decode server, on this machine.

The same multi-turn load goes to a prefill server with LAPS and to a stock one with ``fcfs``, in turns (A B B A), both
in front of one decode server. What comes out: one table, one picture, ``piece.json``.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp

from benchmark.results.pictures import distributions
from benchmark.results.piece import Piece, Table, command
from benchmark.rig import model, servers, stats
from benchmark.rig.load import Seen, session, spread, stream
from benchmark.rig.progress import Progress

CHUNK = 1024
SESSIONS = 3
"""Users in a conversation at the same time."""
PACE_S = (0.4, 1.0)
"""Between a user's turns. They keep this pace whatever the answers take, so both variants are offered the same load;
only an answer that is not there yet delays the next turn."""
DOCUMENT_TOKENS = (1800, 2200)
ANSWER_TOKENS = 4
VARIANTS: dict[str, tuple[str, ...]] = {"laps": ("--enable-laps-scheduler",), "fcfs": ("--schedule-policy", "fcfs")}
ORDER = ("laps", "fcfs", "fcfs", "laps") * 2
"""Short rounds in turns: what else the machine does for half a minute meets both."""
# On a CPU the overlap loop runs the next batch before it hands out the answers of the one before.
COMMON = ("--max-total-tokens", "65536", "--context-length", "8192", "--disable-overlap-schedule")
PREFILL = ("--chunked-prefill-size", str(CHUNK), *COMMON)
DECODE = COMMON
ONE_CORE = {"OMP_NUM_THREADS": "1"}


class Words:
    """Text of a wanted length in tokens, never the same twice."""

    def __init__(self, folder: Path, seed: int) -> None:
        from transformers import AutoTokenizer

        self._words = sorted({w for text in model.corpus() for w in text.split() if w.isalpha()})
        tokenizer = AutoTokenizer.from_pretrained(folder)
        sample = " ".join(self._words)
        self._per_word = len(tokenizer(sample)["input_ids"]) / len(self._words)
        self._rng = random.Random(seed)

    def text(self, tokens: int) -> str:
        """About `tokens` tokens of words."""
        return " ".join(self._rng.choices(self._words, k=max(1, round(tokens / self._per_word))))


async def conversation(
    http: aiohttp.ClientSession, url: str, words: Words, rng: random.Random, epoch: float, until: float, out: list[Seen]
) -> None:
    """One user: short turns on a history that grows, a new conversation now and then."""
    messages: list[dict[str, str]] = []
    due = epoch
    while (due := due + rng.uniform(*PACE_S)) < until:
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        if len(messages) >= 16:
            messages = []
        messages = [*messages, {"role": "user", "content": words.text(rng.randint(10, 60))}]
        seen = await ask(http, url, messages, "short", epoch)
        out.append(seen)
        messages.append({"role": "assistant", "content": seen.text})


async def documents(
    http: aiohttp.ClientSession, url: str, words: Words, arrivals: Sequence[float], epoch: float, out: list[Seen]
) -> None:
    """Long documents at their own times, whatever the answers."""
    jobs = []
    rng = random.Random(len(arrivals))
    for at in arrivals:
        prompt = words.text(rng.randint(*DOCUMENT_TOKENS))
        await asyncio.sleep(max(0.0, epoch + at - time.perf_counter()))
        jobs.append(asyncio.ensure_future(ask(http, url, [{"role": "user", "content": prompt}], "long", epoch)))
    out.extend(await asyncio.gather(*jobs))


async def ask(http: aiohttp.ClientSession, url: str, messages: list[dict[str, str]], kind: str, epoch: float) -> Seen:
    """One chat completion, streamed."""
    body = {"model": "demo", "messages": messages, "max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True}
    return await stream(http, url + "/v1/chat/completions", body, kind, epoch)


async def one_round(
    url: str, words: Words, seed: int, span_s: float, document_rate: float, progress: Progress, label: str
) -> tuple[list[Seen], float]:
    """The mixed load for `span_s` seconds; what was seen, and how long until the last answer."""
    rng, out = random.Random(seed), []  # type: tuple[random.Random, list[Seen]]
    async with session() as http:
        epoch = time.perf_counter()
        users = [
            conversation(http, url, words, random.Random(rng.random()), epoch, epoch + span_s, out)
            for _ in range(SESSIONS)
        ]
        load = asyncio.gather(*users, documents(http, url, words, spread(document_rate, span_s, rng), epoch, out))
        while not load.done():
            progress(f"{label}: {len(out)} answers, {stats.failed(out)} failed")
            await asyncio.wait([load], timeout=0.5)
        await load
        return out, time.perf_counter() - epoch


async def lone_long_s(url: str, words: Words) -> float:
    """Median time to first token of one document on an idle server (seconds)."""
    async with session() as http:
        for _ in range(3):
            await ask(http, url, [{"role": "user", "content": words.text(40)}], "short", 0.0)
        times = [
            await ask(http, url, [{"role": "user", "content": words.text(sum(DOCUMENT_TOKENS) // 2)}], "long", 0.0)
            for _ in range(3)
        ]
    return statistics.median(t.ttft_s or t.total_s for t in times)


def summary(rounds: Sequence[tuple[list[Seen], float]]) -> dict[str, Any]:
    """Quantiles over all requests of a variant's rounds."""
    seen = [s for r, _ in rounds for s in r]
    good = len(seen) - stats.failed(seen)
    return {
        **{kind: stats.quantiles(stats.ttft_ms(seen, kind)) for kind in ("short", "long")},
        "rps": round(good / sum(took for _, took in rounds), 3),
        "failed": stats.failed(seen),
        "requests": {kind: sum(s.kind == kind for s in seen) for kind in ("short", "long")},
    }


def table(result: dict[str, dict[str, Any]]) -> Table:
    """The figures, and the ratio of LAPS to fcfs below them."""
    columns = [(kind, q) for kind in ("short", "long") for q in ("p50_ms", "p90_ms", "p99_ms")]
    heads = ("", *(f"{k} {q[:3].upper()}" for k, q in columns), "requests/s", "failed")
    rows: list[Sequence[str]] = [
        (n, *(f"{v[k][q]:.0f}" for k, q in columns), f"{v['rps']:.2f}", str(v["failed"])) for n, v in result.items()
    ]
    a, b = result["laps"], result["fcfs"]
    ratios = (f"{a[k][q] / b[k][q]:.2f}" for k, q in columns)
    rows.append(("laps / fcfs", *ratios, f"{a['rps'] / b['rps']:.2f}", ""))
    return Table("TTFT (ms)", heads, rows)


def picture(rounds: dict[str, list[tuple[list[Seen], float]]], path: Path) -> None:
    """The two distributions of TTFT, short and long side by side."""
    curves = {
        kind: {name: sorted(stats.ttft_ms([s for seen, _ in of for s in seen], kind)) for name, of in rounds.items()}
        for kind in ("short", "long")
    }
    distributions(curves, "SGLang prefill with LAPS and with stock fcfs, the same load", path)


@contextmanager
def fleet(folder: Path, out: Path, progress: Progress, port: int | None = None) -> Iterator[dict[str, servers.Server]]:
    """Decode server, a prefill server and a router a variant; the routers by variant, on `port` and those above it."""
    ports = {name: None if port is None else port + i for i, name in enumerate(VARIANTS)}
    for name, taken in ports.items():
        if taken is not None:
            servers.require_free(taken, f"router ({name})")
    started: list[servers.Server] = []
    routers: dict[str, servers.Server] = {}
    try:
        decode = servers.decode(folder, out / "decode.log", *DECODE)
        decode.env = ONE_CORE
        prefills = {}
        for name, args in VARIANTS.items():
            log = out / f"prefill-{name}.log"
            prefills[name] = servers.prefill(
                folder, log, *PREFILL, *args, env={**ONE_CORE, **servers.KEEP_MEMORY}, name=f"prefill server ({name})"
            )
        started.extend(server.start() for server in (decode, *prefills.values()))
        for server in (decode, *prefills.values()):
            server.ready(tick=lambda _, n=server.name: progress(f"starting the {n}"))  # type: ignore[misc]
        for name, prefill in prefills.items():
            log = out / f"router-{name}.log"
            routers[name] = servers.minilb([prefill], [decode], log, port=ports[name], name=f"router ({name})")
            started.append(routers[name].start())
        for router in routers.values():
            router.ready(tick=lambda _: progress("starting the routers"))
        yield routers
    finally:
        progress("stopping the servers")
        for server in reversed(started):
            server.stop()
        progress.done()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; 0 if no request failed."""
    parser = argparse.ArgumentParser(prog="./run demo", description=__doc__)
    parser.add_argument("--seconds", type=float, default=17.0, help="length of each of the eight rounds (17)")
    parser.add_argument("--utilisation", type=float, default=0.4, help="of the prefill server by documents (0.4)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--port", type=int, help="port of the first router, the second takes the next (default: free ones)"
    )
    parser.add_argument("--out", type=Path, default=model.REPO / "out" / "demo")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    # Also where a shell started us with interrupts ignored; and a plain kill ends the servers too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    progress = Progress(live=True)
    progress("making the model")
    folder = model.make(model.REPO / "out" / "models", model.SLICED)
    words = Words(folder, args.seed)
    rounds: dict[str, list[tuple[list[Seen], float]]] = {name: [] for name in VARIANTS}
    try:
        with fleet(folder, args.out, progress, args.port) as routers:
            progress("measuring a lone document")
            alone = [asyncio.run(lone_long_s(router.url, words)) for router in routers.values()]
            rate = args.utilisation / min(alone)
            for i, name in enumerate(ORDER):
                label = f"round {i + 1} of {len(ORDER)}, {name}"
                seed = args.seed + i // 2
                run = one_round(routers[name].url, words, seed, args.seconds, rate, progress, label)
                rounds[name].append(asyncio.run(run))
    except servers.ServerError as e:
        print(f"demo: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("demo: interrupted; every server has been stopped", file=sys.stderr)
        return 130
    result = {name: summary(r) for name, r in rounds.items()}
    load = {"documents_per_s": round(rate, 3), "users": SESSIONS, "seconds": args.seconds, "lone_long_s": alone}
    piece = Piece(
        name="demo",
        title="Short turns and long documents",
        text="The same load through a router, a prefill server with LAPS or stock fcfs, and a decode server, in turns.",
        seed=args.seed,
        tables=[table(result)],
        pictures={"ttft.png": "Distribution of the time to first token; the dotted line is P90."},
        data={"variants": result, "load": load},
        command=command("benchmark.demo", argv),
    )
    picture(rounds, args.out / "ttft.png")
    piece.write(args.out)
    piece.tell(args.out)
    print(args.out / "ttft.png")
    for error in sorted({s.error for r in rounds.values() for seen, _ in r for s in seen if s.error})[:5]:
        print(f"demo: a request failed: {error}", file=sys.stderr)
    return 1 if any(v["failed"] for v in result.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
