"""Overhead of the routers: back ends are instant and the load generator is cheap, so that the router is measured."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import uvloop

from benchmark.load import Target, client, request
from benchmark.results import Column, Comparison, Namespace, Piece, Table, bars, quantile, take_turns
from benchmark.rig import servers
from benchmark.router import ALL, LAPS, STOCK, routers

PREFILLS, DECODES = 4, 1
STREAM_EVENTS = 16
CLIENTS = (1, 32)
EVENT = b'data: {"text":"x","meta_info":{"prompt_tokens":8,"completion_tokens":1}}\n\n'
REPLY = b'{"text":"x","meta_info":{"prompt_tokens":8,"completion_tokens":1}}'
COLUMNS = (
    Column("requests/s", ("per_s",)),
    Column("P99 ms", ("p99_ms",), ".1f"),
    Column("CPU ms a request", ("cpu_ms",), ".2f"),
)


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


async def serve(ports: list[int]) -> None:
    """Run echo servers on all ``ports`` of loopback, until killed."""
    loop = asyncio.get_running_loop()
    started = [await loop.create_server(Echo, servers.HOST, p, backlog=4096) for p in ports]
    await asyncio.gather(*(s.serve_forever() for s in started))


@contextmanager
def back_ends(count: int, out: Path) -> Iterator[list[servers.Server]]:
    """Run ``count`` echo servers in one process."""
    ports = [servers.free_port() for _ in range(count)]
    command = (sys.executable, "-m", "benchmark.router.echo", *map(str, ports))
    with servers.running(servers.Server("echo servers", command, ports[0], out / "logs" / "echo.log")) as (first,):
        yield [servers.Server("echo", (), p, first.log, process=first.process, bootstrap_port=8998) for p in ports]


def pin(process: servers.Process | None, core: int) -> None:
    """Run a process, or this one, on one core, if the machine has more."""
    if len(os.sched_getaffinity(0)) > 1:
        os.sched_setaffinity(process.pid if process else 0, {core})


def cpu_s(server: servers.Server) -> float:
    """Return the CPU time of a server's processes so far (seconds)."""
    return sum(t.user + t.system for t in (p.cpu_times() for p in server.family()))


def measured(server: servers.Server, clients: int, seconds: float, *, stream: bool) -> dict[str, float]:
    """Run one round; return its figures. The router's CPU time per request (ms) is less sensitive to other work."""
    body = request({"text": "hello, how are you?", "sampling_params": {"max_new_tokens": 8}, "stream": stream})
    before = cpu_s(server)
    loop = uvloop.run(client.closed(Target(servers.HOST, server.port), [body], clients, seconds, run_in_s=0.0))
    if not loop.whole_s:
        raise ConnectionError(f"{server.name} answered nothing")
    return {
        "per_s": loop.steady.require(server.name).requests_per_s,
        "p99_ms": 1e3 * quantile(loop.whole_s, 99),
        "cpu_ms": 1e3 * (cpu_s(server) - before) / len(loop.asked),
        "failed": loop.failed,
    }


def run(args: Namespace) -> Piece:
    """Run all routers in front of the same instant back ends: routers on one core, all other processes on another."""
    cores, seconds, loads = sorted(os.sched_getaffinity(0)), args.seconds or 3.0, dict[str, Comparison]()
    with back_ends(PREFILLS + DECODES, args.out) as behind:
        up = routers(behind[:PREFILLS], behind[PREFILLS:], args.out, ALL)
        with servers.running(*up.values()):
            pin(None, cores[-1])
            pin(behind[0].process, cores[-1])
            for router in up.values():
                pin(router.process, cores[0])
            for stream, clients in product((False, True), CLIENTS):

                def once(_: int, name: str, stream: bool = stream, clients: int = clients) -> dict[str, float]:
                    return measured(up[name], clients, seconds, stream=stream)

                load = f"{'stream' if stream else 'whole'}, {clients} clients"
                loads[load] = Comparison(take_turns(ALL, args.rounds, once, args.say, f"{load}, "))
    figures = [
        seen.figure(f"router: {what}, {load}, laps / stock", LAPS, STOCK, (key,), bar)
        for load, seen in loads.items()
        for what, key, bar in (("requests/s", "per_s", bars.ROUTER_RATE), ("P99 latency", "p99_ms", bars.ROUTER_P99))
    ]
    text = (
        "Stock MiniLB, the LAPS router and SGLang's Rust gateway with the policies named, in front of the same "
        f"instant back ends, in turns; medians over {args.rounds} rounds."
    )
    heads = ("reply, clients", "router", *(c.head for c in COLUMNS))
    rows = [(load, *row) for load, seen in loads.items() for row in seen.rows(COLUMNS)]
    table = Table("Routers in front of instant back ends", heads, rows, "CPU: of the router.")
    data = {"loads": {load: seen.rounds for load, seen in loads.items()}, "seconds": seconds}
    return Piece("router-echo", "What the router costs", text, 0, [table], figures, data=data)


if __name__ == "__main__":
    uvloop.run(serve([int(port) for port in sys.argv[1:]]))
