"""The router against stock MiniLB, both in one run.

    python -m benchmark.router --echo     what the router itself costs: instant back ends, requests/s and latency
    python -m benchmark.router --mix      short share 90% -> 10% -> 90%: how fast and with how many moves pools follow
    python -m benchmark.router --real     three real prefill servers and a decode server: TTFT of short chats among long

Rounds of both routers alternate, and figures are medians over rounds (ratios: medians of the rounds' ratios).
Results go to out/router-<mode>.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import orjson
import psutil
import uvloop
from aiohttp import web

from benchmark.rig import load, model, servers, stats

OUT = Path(__file__).resolve().parents[1] / "out"
PREFILLS, DECODES = 4, 1
STREAM_EVENTS = 16
STOCK, LAPS = "stock", "laps"
MODULES = {STOCK: "sglang_router.launch_router", LAPS: "sglang_router_laps.launch_router"}
FLAGS = {STOCK: (), LAPS: ("--enable-laps-alloc",)}


# -- instant back ends and a load that costs little, so that the router is what is measured

EVENT = b'data: {"text":"x","meta_info":{"prompt_tokens":8,"completion_tokens":1}}\n\n'
REPLY = b'{"text":"x","meta_info":{"prompt_tokens":8,"completion_tokens":1}}'


class Echo(asyncio.Protocol):
    """Answers every POST at once: one JSON object, or a stream of STREAM_EVENTS events in one piece each."""

    whole = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(REPLY), REPLY)
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    chunk = b"%x\r\n%b\r\n" % (len(EVENT), EVENT)

    def connection_made(self, transport: Any) -> None:
        self.transport, self.buffer = transport, b""

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while True:
            end = self.buffer.find(b"\r\n\r\n")
            if end < 0:
                return
            head = self.buffer[:end].lower()
            at = head.find(b"content-length:")
            length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            if len(self.buffer) < end + 4 + length:
                return
            body, self.buffer = self.buffer[end + 4 : end + 4 + length], self.buffer[end + 4 + length :]
            if b'"stream":true' in body:
                self.transport.write(self.head)
                for _ in range(STREAM_EVENTS):
                    self.transport.write(self.chunk)
                self.transport.write(b"0\r\n\r\n")
            elif head.startswith(b"get /laps_status") or head.startswith(b"get /v1/loads"):
                self.transport.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
            else:
                self.transport.write(self.whole)


async def serve_echo(ports: Sequence[int]) -> None:
    """Echo servers on all ``ports`` of loopback, until killed."""
    loop = asyncio.get_running_loop()
    started = [await loop.create_server(Echo, servers.HOST, p, backlog=4096) for p in ports]
    await asyncio.gather(*(s.serve_forever() for s in started))


class Client(asyncio.Protocol):
    """One keep-alive connection that sends its request again as soon as it is answered."""

    def __init__(self, request: bytes, note: Callable[[float], bool]) -> None:
        self.request, self.note = request, note
        self.closed = asyncio.get_running_loop().create_future()
        self.failed = 0

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.send()

    def send(self) -> None:
        self.buffer = b""
        self.begin = time.perf_counter()
        self.transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        head = self.buffer.find(b"\r\n\r\n")
        if head < 0:
            return
        if b"chunked" in self.buffer[:head].lower():
            if not self.buffer.endswith(b"\r\n0\r\n\r\n"):
                return
        else:
            lower = self.buffer[:head].lower()
            length = int(lower[lower.index(b"content-length:") + 15 :].split(b"\r\n", 1)[0])
            if len(self.buffer) < head + 4 + length:
                return
        if not self.buffer.startswith(b"HTTP/1.1 200"):
            self.failed += 1
        if self.note(time.perf_counter() - self.begin):
            self.send()
        else:
            self.transport.close()

    def connection_lost(self, _: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(None)


async def drive(port: int, body: dict[str, Any], clients: int, seconds: float) -> dict[str, float]:
    """Closed loop of ``clients`` connections for ``seconds``: requests/s and latency quantiles (ms)."""
    raw = orjson.dumps(body)
    request = (
        b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
        % (len(raw), raw)
    )
    times: list[float] = []
    stop_at = time.perf_counter() + seconds

    def note(latency: float) -> bool:
        times.append(latency)
        return time.perf_counter() < stop_at

    loop = asyncio.get_running_loop()
    begin = time.perf_counter()
    made = [
        (await loop.create_connection(lambda: Client(request, note), servers.HOST, port))[1] for _ in range(clients)
    ]
    await asyncio.gather(*(c.closed for c in made))
    spent = time.perf_counter() - begin
    p50, p99 = np.quantile(times, (0.5, 0.99))
    return {
        "per_s": len(times) / spent,
        "p50_ms": float(p50) * 1e3,
        "p99_ms": float(p99) * 1e3,
        "failed": sum(c.failed for c in made),
    }


def pin(pid: int, cores: set[int]) -> None:
    """Keep a process on ``cores``, where the machine has more than one."""
    if len(os.sched_getaffinity(0)) > 1:
        os.sched_setaffinity(pid, cores)


@contextmanager
def echo_servers(count: int) -> Iterator[list[servers.Server]]:
    """``count`` echo servers in one process."""
    ports = [servers.free_port() for _ in range(count)]
    command = (sys.executable, "-m", "benchmark.router", "--serve-echo", *map(str, ports))
    with servers.running(servers.Server("echo servers", command, ports[0], OUT / "logs" / "echo.log")) as (first,):
        stand_ins = []
        for port in ports:
            server = servers.Server("echo", (), port, first.log, process=first.process)
            server.bootstrap_port = 8998  # type: ignore[attr-defined]
            stand_ins.append(server)
        yield stand_ins


def median(rounds: Sequence[dict[str, float]], key: str) -> float:
    return statistics.median(r[key] for r in rounds)


def measured(router: servers.Server, body: dict[str, Any], clients: int, seconds: float) -> dict[str, float]:
    """One round, with the CPU time a request costs the router (ms): a figure other work on the machine moves less."""
    assert router.process
    process = psutil.Process(router.process.pid)
    before = process.cpu_times()
    seen = uvloop.run(drive(router.port, body, clients, seconds))
    after = process.cpu_times()
    spent = after.user + after.system - before.user - before.system
    return {**seen, "cpu_ms": spent * 1e3 / (seen["per_s"] * seconds)}


def echo(rounds: int, seconds: float) -> dict[str, Any]:
    """Both routers in front of the same instant back ends."""
    cores = sorted(os.sched_getaffinity(0))
    routers_core, rest = {cores[0]}, set(cores[1:2]) or {cores[0]}
    result: dict[str, Any] = {"rounds": rounds, "seconds": seconds, "prefill": PREFILLS, "decode": DECODES, "loads": []}
    with ExitStack() as stack:
        behind = stack.enter_context(echo_servers(PREFILLS + DECODES))
        routers = {
            name: servers.minilb(
                behind[:PREFILLS], behind[PREFILLS:], OUT / "logs" / f"router-{name}.log", *FLAGS[name],
                module=MODULES[name], name=name,
            )
            for name in (STOCK, LAPS)
        }  # fmt: skip
        stack.enter_context(servers.running(*routers.values()))
        pin(0, rest)
        for s, core in ((behind[0], rest), *((r, routers_core) for r in routers.values())):
            assert s.process
            pin(s.process.pid, core)
        for stream in (False, True):
            for clients in (1, 8, 32):
                body = {"text": "hello, how are you?", "sampling_params": {"max_new_tokens": 8}, "stream": stream}
                seen: dict[str, list[dict[str, float]]] = {STOCK: [], LAPS: [], "direct": []}
                for i in range(rounds):
                    order = [*routers] if i % 2 else [*reversed(routers)]
                    for name in order:
                        seen[name].append(measured(routers[name], body, clients, seconds))
                    seen["direct"].append(uvloop.run(drive(behind[-1].port, body, clients, seconds / 4)))
                pairs = list(zip(seen[LAPS], seen[STOCK], seen["direct"], strict=True))
                result["loads"].append(
                    {
                        "stream": stream,
                        "clients": clients,
                        "requests_per_s": {n: round(median(r, "per_s"), 1) for n, r in seen.items()},
                        "p50_ms": {n: round(median(r, "p50_ms"), 3) for n, r in seen.items()},
                        "p99_ms": {n: round(median(r, "p99_ms"), 3) for n, r in seen.items()},
                        "failed": {n: sum(x["failed"] for x in r) for n, r in seen.items()},
                        "cpu_ms": {n: round(median(seen[n], "cpu_ms"), 3) for n in routers},
                        "cpu_of_stock": round(statistics.median(a["cpu_ms"] / b["cpu_ms"] for a, b, _ in pairs), 2),
                        "times_stock": round(statistics.median(a["per_s"] / b["per_s"] for a, b, _ in pairs), 2),
                        "added_p99_of_stock": round(
                            statistics.median(
                                (a["p99_ms"] - d["p99_ms"]) / (b["p99_ms"] - d["p99_ms"]) for a, b, d in pairs
                            ),
                            2,
                        ),
                    }
                )
                print(json.dumps(result["loads"][-1]), flush=True)
    return result


# -- simulated prefill servers: one request at a time at a fixed speed, with the status a LAPS server gives

SPEED = 12_000
"""Prefill speed of one simulated server (tokens/s)."""
SHORT_TOKENS, LONG_TOKENS = 240, 720
LOAD = 0.6
"""Share of all servers' speed that the load asks for, in every phase."""
SHARES = (0.9, 0.1, 0.9)
"""Short requests among all, phase by phase."""


Rooms = dict[int, asyncio.Event]


class SimulatedPrefill:
    """A server whose device does one prompt at a time."""

    def __init__(self, rooms: Rooms) -> None:
        self.rooms = rooms
        self.backlog = 0
        self.busy_s = 0.0
        self.seen = (time.perf_counter(), 0.0)
        self.device = asyncio.Lock()

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        tokens = len(body["input_ids"])
        self.backlog += tokens
        try:
            async with self.device:
                await asyncio.sleep(tokens / SPEED)
                self.busy_s += tokens / SPEED
        finally:
            self.backlog -= tokens
        self.rooms.setdefault(body["bootstrap_room"], asyncio.Event()).set()
        return web.json_response({"meta_info": {"prompt_tokens": tokens}})

    async def status(self, _: web.Request) -> web.Response:
        now, (then, before) = time.perf_counter(), self.seen
        self.seen = (now, self.busy_s)
        share = min(1.0, (self.busy_s - before) / max(now - then, 1e-6))
        return web.json_response(
            {"enabled": True, "load": {"backlog_tokens": self.backlog, "slo_deviation": 0.0, "busy_share": share}}
        )


class SimulatedDecode:
    """Answers once the prompt is prefilled."""

    def __init__(self, rooms: Rooms) -> None:
        self.rooms = rooms

    async def generate(self, request: web.Request) -> web.Response:
        room = (await request.json())["bootstrap_room"]
        await self.rooms.setdefault(room, asyncio.Event()).wait()
        del self.rooms[room]
        return web.json_response({"text": "x", "meta_info": {}})


async def mix_phase(
    http: aiohttp.ClientSession, url: str, n: int, share: float, seconds: float, rng: random.Random
) -> list[asyncio.Task[None]]:
    """Poisson arrivals for ``seconds``."""
    per_request = share * SHORT_TOKENS + (1 - share) * LONG_TOKENS
    rate = LOAD * n * SPEED / per_request
    end, sent = time.perf_counter() + seconds, []

    async def one(tokens: int) -> None:
        ids = [rng.randrange(1000) for _ in range(tokens)]
        async with http.post(f"{url}/generate", json={"input_ids": ids}) as reply:
            await reply.read()

    at = time.perf_counter()
    while at < end:
        await asyncio.sleep(max(0.0, at - time.perf_counter()))
        sent.append(asyncio.create_task(one(SHORT_TOKENS if rng.random() < share else LONG_TOKENS)))
        at += rng.expovariate(rate)
    return sent


async def mix(n: int, period_s: float, phase_s: float, seed: int) -> dict[str, Any]:
    """Pools under a mix that changes twice. The first phase starts from an even split and is warm-up."""
    rng = random.Random(seed)
    runners, urls = [], []
    rooms: Rooms = {}
    for i in range(n + 1):
        app = web.Application()
        if i < n:
            one = SimulatedPrefill(rooms)
            app.router.add_post("/generate", one.generate)
            app.router.add_get("/laps_status", one.status)
        else:
            app.router.add_post("/generate", SimulatedDecode(rooms).generate)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, servers.HOST, servers.free_port())
        await site.start()
        runners.append(runner)
        urls.append(site.name)
    port = servers.free_port()
    command = [sys.executable, "-m", MODULES[LAPS], "--pd-disaggregation", "--mini-lb", "--host", servers.HOST]
    command += ["--port", str(port), *FLAGS[LAPS], "--laps-rebalance-interval-s", str(period_s)]
    for url in urls[:n]:
        command += ["--prefill", url]
    router = servers.Server("router", [*command, "--decode", urls[n]], port, OUT / "logs" / "router-mix.log")
    try:
        await asyncio.to_thread(lambda: router.start().ready())
        changes = []
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
            for share in SHARES:
                begin = time.time()
                sent = await mix_phase(http, router.url, n, share, phase_s, rng)
                async with http.get(f"{router.url}/laps_status") as reply:
                    status = await reply.json()
                moves = sorted((m for m in status["migrations"] if m["at"] >= begin), key=lambda m: m["at"])
                changes.append(
                    {
                        "short_share": share,
                        "split": [len(status["pools"]["short"]), len(status["pools"]["long"])],
                        "moves": [[round((m["at"] - begin) / period_s, 2), m["to"]] for m in moves],
                        "ttft_p90_ms": {c: status["ttft_ms"][c]["p90"] for c in ("short", "long")},
                        "failed": status["counts"]["failed"],
                    }
                )
                print(json.dumps(changes[-1]), flush=True)
                await asyncio.gather(*sent)
    finally:
        await asyncio.to_thread(router.stop)
        for runner in runners:
            await runner.cleanup()
    return {"prefill": n, "period_s": period_s, "phase_s": phase_s, "changes": changes}


# -- real servers: the same ones behind both routers

REAL_PREFILLS = 3
LAPS_PREFILL = ("--enable-laps-scheduler",)
CHAT_WORDS, DOCUMENT_WORDS = 20, 5000
SHORT_PER_S = 4.0
LONG_LOAD = 0.45
"""Share of all prefill servers' time that the long prompts ask for."""


async def first_token(http: aiohttp.ClientSession, url: str, kind: str, epoch: float, rng: random.Random) -> load.Seen:
    """One streamed request; its first event is its first token, whatever text that makes."""
    tokens = CHAT_WORDS if kind == "short" else DOCUMENT_WORDS
    body = {
        "input_ids": [rng.randrange(3, 2000) for _ in range(tokens)],
        "sampling_params": {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True},
        "stream": True,
    }
    begin = time.perf_counter()
    seen = load.Seen(kind, begin - epoch, None, 0.0)
    async with http.post(f"{url}/generate", json=body) as reply:
        async for line in reply.content:
            if line.startswith(b"data:") and seen.ttft_s is None:
                seen.ttft_s = time.perf_counter() - begin
                seen.error = line.decode() if b'"error"' in line or reply.status != 200 else None
    seen.total_s = time.perf_counter() - begin
    if seen.ttft_s is None:
        seen.error = f"HTTP {reply.status} without a token"
    return seen


async def real_round(url: str, seconds: float, long_per_s: float, rng: random.Random) -> dict[str, Any]:
    """Poisson arrivals of both kinds for ``seconds``; every prompt is new."""
    arrivals = []
    for kind, rate in (("short", SHORT_PER_S), ("long", long_per_s)):
        at = rng.expovariate(rate)
        while at < seconds:
            arrivals.append((at, kind))
            at += rng.expovariate(rate)
    async with load.session() as http:
        begin = time.perf_counter()

        async def one(at: float, kind: str) -> load.Seen:
            await asyncio.sleep(max(0.0, begin + at - time.perf_counter()))
            return await first_token(http, url, kind, begin, rng)

        seen = await asyncio.gather(*(one(*a) for a in sorted(arrivals)))
    result: dict[str, Any] = {k: stats.quantiles(stats.ttft_ms(seen, k)) for k in ("short", "long")}
    return {**result, "requests": len(seen), "failed": stats.failed(seen)}


async def long_prompt_s(url: str, rng: random.Random) -> float:
    """What one long prompt takes when nothing else runs (seconds): the median of five, after one to warm up."""
    async with load.session() as http:
        times = []
        for _ in range(6):
            seen = await first_token(http, url, "long", time.perf_counter(), rng)
            times.append(seen.ttft_s or float("inf"))
    return statistics.median(times[1:])


def real(rounds: int, seconds: float, seed: int, prefill_flags: Sequence[str]) -> dict[str, Any]:
    """Short P90 TTFT behind both routers; rounds alternate, each pair of rounds has the same arrivals.

    Without ``prefill_flags`` the servers are stock, so that the difference is the router's alone.
    """
    checkpoint = model.make(Path(os.environ.get("LAPS_MODELS", model.REPO / "out" / "models")))
    env = {"OMP_NUM_THREADS": "1"}
    limits = ("--chunked-prefill-size", "1024", "--max-total-tokens", "65536")
    flags = ("--disable-overlap-schedule", *limits, *prefill_flags)
    prefills = [
        servers.prefill(checkpoint, OUT / "logs" / f"prefill{i}.log", *flags, env=env, name=f"prefill {i}")
        for i in range(REAL_PREFILLS)
    ]
    decode = servers.decode(checkpoint, OUT / "logs" / "decode.log", "--max-total-tokens", "262144")
    decode.env = env
    routers = {
        name: servers.minilb(
            prefills, [decode], OUT / "logs" / f"router-{name}.log", *FLAGS[name], module=MODULES[name], name=name
        )
        for name in (STOCK, LAPS)
    }
    seen: dict[str, list[dict[str, Any]]] = {STOCK: [], LAPS: []}
    with servers.running(*prefills, decode, *routers.values()):
        alone_s = uvloop.run(long_prompt_s(routers[STOCK].url, random.Random(seed)))
        # Servers share the cores of this machine: no more than those run at a time.
        at_once = min(REAL_PREFILLS, len(os.sched_getaffinity(0)))
        long_per_s = LONG_LOAD * at_once / alone_s
        for i in range(rounds):
            for name in [*routers] if i % 2 else [*reversed(routers)]:
                rng = random.Random(seed + 1 + i)
                seen[name].append(uvloop.run(real_round(routers[name].url, seconds, long_per_s, rng)))
                print(name, json.dumps(seen[name][-1]), flush=True)
    ratios = [a["short"]["p90_ms"] / b["short"]["p90_ms"] for a, b in zip(seen[LAPS], seen[STOCK], strict=True)]
    return {
        "prefill": REAL_PREFILLS,
        "prefill_flags": list(prefill_flags),
        "long_prompt_alone_s": round(alone_s, 3),
        "short_per_s": SHORT_PER_S,
        "long_per_s": round(long_per_s, 3),
        "rounds": seen,
        "short_p90_of_stock": round(statistics.median(ratios), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--echo", action="store_true")
    mode.add_argument("--mix", action="store_true")
    mode.add_argument("--real", action="store_true")
    mode.add_argument("--serve-echo", type=int, nargs="+", metavar="PORT", help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--seconds", type=float, help="length of a round of --echo (3) or --real (20), of a phase of --mix (12 periods)"
    )
    parser.add_argument("--prefill", type=int, nargs="+", default=[4, 8], help="prefill servers of --mix")
    parser.add_argument("--laps-prefill", action="store_true", help="--real with LAPS prefill servers, not stock ones")
    parser.add_argument("--period", type=float, default=2.0, help="control period of --mix (seconds)")
    args = parser.parse_args()
    if args.serve_echo:
        uvloop.run(serve_echo(args.serve_echo))
        return
    result: Any
    if args.echo:
        name, result = "echo", echo(args.rounds, args.seconds or 3.0)
    elif args.real:
        name, result = "real", real(args.rounds, args.seconds or 20.0, 1, LAPS_PREFILL if args.laps_prefill else ())
        print(json.dumps({k: v for k, v in result.items() if k != "rounds"}))
    else:
        phase_s = args.seconds or 12 * args.period
        name, result = "mix", [uvloop.run(mix(n, args.period, phase_s, seed=n)) for n in args.prefill]
    OUT.mkdir(exist_ok=True)
    (OUT / f"router-{name}.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
