"""Overhead of the routers, in front of instant back ends and under a cheap load, so that the router is measured."""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import uvloop

from benchmark.load import client
from benchmark.load.connection import Target, request
from benchmark.results import bars
from benchmark.results.piece import Figure, Piece, Table
from benchmark.results.rounds import interleaved, ratio
from benchmark.rig import servers
from benchmark.suites.router import ALL, LAPS, STOCK, routers

PREFILLS, DECODES = 4, 1
STREAM_EVENTS = 16
CLIENTS = (1, 8, 32)
DIRECT = "direct"
"""Requests to a back end, without a router."""
EVENT = b'data: {"text":"x","meta_info":{"prompt_tokens":8,"completion_tokens":1}}\n\n'
REPLY = b'{"text":"x","meta_info":{"prompt_tokens":8,"completion_tokens":1}}'


class Echo(asyncio.Protocol):
    """Answers every POST at once: one JSON object, or a stream of STREAM_EVENTS events, one per chunk."""

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


async def serve(ports: Sequence[int]) -> None:
    """Run echo servers on all ``ports`` of loopback, until killed."""
    loop = asyncio.get_running_loop()
    started = [await loop.create_server(Echo, servers.HOST, p, backlog=4096) for p in ports]
    await asyncio.gather(*(s.serve_forever() for s in started))


@contextmanager
def back_ends(count: int, out: Path) -> Iterator[list[servers.Server]]:
    """Run ``count`` echo servers in one process."""
    ports = [servers.free_port() for _ in range(count)]
    command = (sys.executable, "-m", "benchmark.router", "--serve-echo", *map(str, ports))
    with servers.running(servers.Server("echo servers", command, ports[0], out / "logs" / "echo.log")) as (first,):
        yield [servers.Server("echo", (), p, first.log, process=first.process, bootstrap_port=8998) for p in ports]


def pin(pid: int, cores: set[int]) -> None:
    """Pin a process to ``cores``, if the machine has more than one."""
    if len(os.sched_getaffinity(0)) > 1:
        os.sched_setaffinity(pid, cores)


def measured(server: servers.Server, body: bytes, clients: int, seconds: float) -> dict[str, float]:
    """Run one round. The CPU time per request at the server (ms) is less sensitive to other work on the machine."""
    assert server.process
    process = psutil.Process(server.process.pid)
    before = process.cpu_times()
    loop = uvloop.run(client.closed(Target(servers.HOST, server.port), [body], clients, seconds, run_in_s=0.0))
    after = process.cpu_times()
    if not loop.whole_s:
        raise ConnectionError(f"{server.name} answered nothing")
    spent = after.user + after.system - before.user - before.system
    steady = loop.steady.require(server.name)
    p50, p99 = np.quantile(loop.whole_s, (0.5, 0.99))
    return {
        "per_s": steady.requests_per_s,
        "clients": steady.clients,
        "mean_ttft_s": steady.mean_ttft_s,
        "littles_ratio": steady.littles_ratio,
        "p50_ms": 1e3 * float(p50),
        "p99_ms": 1e3 * float(p99),
        "failed": loop.failed,
        "cpu_ms": 1e3 * spent / len(loop.asked),
    }


Rounds = dict[str, list[dict[str, float]]]
"""Rounds by router, and without one."""


def run(out: Path, rounds: int, seconds: float, say: Callable[[str], None]) -> Piece:
    """Run all routers in front of the same instant back ends."""
    cores = sorted(os.sched_getaffinity(0))
    routers_core, rest = {cores[0]}, set(cores[1:2]) or {cores[0]}
    loads: dict[str, Rounds] = {}
    with ExitStack() as stack:
        behind = stack.enter_context(back_ends(PREFILLS + DECODES, out))
        up = routers(behind[:PREFILLS], behind[PREFILLS:], out, ALL)
        stack.enter_context(servers.running(*up.values()))
        pin(0, rest)
        for s, core in ((behind[0], rest), *((r, routers_core) for r in up.values())):
            assert s.process
            pin(s.process.pid, core)
        for stream in (False, True):
            for clients in CLIENTS:
                load = f"{'stream' if stream else 'whole'}, {clients} clients"
                say(load)
                body = request(
                    {"text": "hello, how are you?", "sampling_params": {"max_new_tokens": 8}, "stream": stream}
                )
                seen = loads[load] = {name: [] for name in (*ALL, DIRECT)}
                for i, name in interleaved(ALL, rounds):
                    seen[name].append(measured(up[name], body, clients, seconds))
                    if len(seen[DIRECT]) == i:
                        seen[DIRECT].append(measured(behind[-1], body, clients, seconds / 4))
    return piece(loads, rounds, seconds)


def piece(loads: dict[str, Rounds], rounds: int, seconds: float) -> Piece:
    """Return the piece for the report."""
    rows, figures = [], []
    for load, seen in loads.items():

        def of(key: str, seen: Rounds = seen) -> dict[str, list[float]]:
            return {name: [r[key] for r in turns] for name, turns in seen.items()}

        rate, p99, cpu = of("per_s"), of("p99_ms"), of("cpu_ms")
        for name in ALL:
            cells = (f"{statistics.median(at[name]):.{k}f}" for at, k in ((rate, 0), (p99, 1), (cpu, 2)))
            rows.append((load, name, *cells))
        figures += [
            Figure.of(f"router: {what}, {load}, laps / stock", ratio(at[LAPS], at[STOCK]), bar)
            for what, at, bar in (("requests/s", rate, bars.ROUTER_RATE), ("P99 latency", p99, bars.ROUTER_P99))
        ]
    heads = ("reply, clients", "router", "requests/s", "P99 ms", "CPU ms a request")
    return Piece(
        name="router-echo",
        title="What the router costs",
        text="Stock MiniLB, the LAPS router and SGLang's Rust gateway with the policies named, in front of the same "
        f"instant back ends, in turns; medians over {rounds} rounds.",
        seed=0,
        tables=[Table("Routers in front of instant back ends", heads, rows, "CPU: of the router.")],
        figures=figures,
        data={"loads": loads, "seconds": seconds, "prefill": PREFILLS, "decode": DECODES},
    )
