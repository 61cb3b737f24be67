"""Overhead of the routers, in front of instant back ends and under a cheap load, so that the router is measured."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import psutil
import uvloop

from benchmark.load import client
from benchmark.load.connection import Target, request
from benchmark.results import Column, Comparison, Figure, Piece, Table, bars, in_turns, quantile
from benchmark.rig import servers
from benchmark.router import ALL, FLAGS, LAPS, MODULES, STOCK, routers

PREFILLS, DECODES = 4, 1
STREAM_EVENTS = 16
CLIENTS = (1, 8, 32)
WORKERS, WORKERS_CLIENTS = (1, 4), 32
WARM_S = 0.5
"""Warm-up in every round of workers, in which each opens its connections to the servers: idle ones are closed between
rounds."""
DIRECT = "direct"
"""Requests to a back end, without a router."""
EVENT = b'data: {"text":"x","meta_info":{"prompt_tokens":8,"completion_tokens":1}}\n\n'
REPLY = b'{"text":"x","meta_info":{"prompt_tokens":8,"completion_tokens":1}}'
Loads = dict[str, dict[str, list[dict[str, float]]]]
"""Load -> router -> figures of each round."""
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


def cpu_s(processes: Sequence[psutil.Process]) -> float:
    """Return the CPU time of the processes so far (seconds)."""
    return sum(t.user + t.system for t in (p.cpu_times() for p in processes))


def measured(
    server: servers.Server, behind: servers.Server, stream: bool, clients: int, seconds: float, warm_s: float = 0.0
) -> dict[str, float]:
    """Run one round. The CPU time per request at the server (ms) is less sensitive to other work on the machine;
    further the cores that it, the back ends and the client keep busy."""
    body = request({"text": "hello, how are you?", "sampling_params": {"max_new_tokens": 8}, "stream": stream})
    target = Target(servers.HOST, server.port)
    at = {"router": server.family(), "back_ends": behind.family(), "client": [psutil.Process()]}
    if warm_s:
        uvloop.run(client.closed(target, [body], clients, warm_s, run_in_s=0.0))
    before = {name: cpu_s(processes) for name, processes in at.items()}
    loop = uvloop.run(client.closed(target, [body], clients, seconds, run_in_s=0.0))
    if not loop.whole_s:
        raise ConnectionError(f"{server.name} answered nothing")
    spent = {name: cpu_s(processes) - before[name] for name, processes in at.items()}
    steady = loop.steady.require(server.name)
    return {
        "per_s": steady.requests_per_s,
        "clients": steady.clients,
        "mean_ttft_s": steady.mean_ttft_s,
        "littles_ratio": steady.littles_ratio,
        **{f"p{q}_ms": 1e3 * quantile(loop.whole_s, q) for q in (50, 99)},
        "failed": loop.failed,
        "cpu_ms": 1e3 * spent["router"] / len(loop.asked),
        **{f"{name}_cores": s / seconds for name, s in spent.items()},
    }


def table(loads: Loads, title: str, first: str, columns: Sequence[Column], names: Sequence[str], note: str) -> Table:
    """Return a table with a row for each load and router."""
    seen = {load: Comparison({n: of[n] for n in names}) for load, of in loads.items()}
    rows = [(load, *row) for load, one in seen.items() for row in one.rows(columns)]
    return Table(title, (first, "router", *(c.head for c in columns)), rows, note)


def run(args: argparse.Namespace) -> Piece:
    """Run all routers in front of the same instant back ends."""
    cores, seconds = sorted(os.sched_getaffinity(0)), args.seconds or 3.0
    routers_core, rest = {cores[0]}, set(cores[1:2]) or {cores[0]}
    loads: Loads = {}
    with ExitStack() as stack:
        behind = stack.enter_context(back_ends(PREFILLS + DECODES, args.out))
        up: Mapping[str, servers.Server] = routers(behind[:PREFILLS], behind[PREFILLS:], args.out, ALL)
        stack.enter_context(servers.running(*up.values()))
        pin(0, rest)
        for s, core in ((behind[0], rest), *((r, routers_core) for r in up.values())):
            assert s.process
            pin(s.process.pid, core)
        for stream, clients in product((False, True), CLIENTS):

            def once(_: int, name: str, stream: bool = stream, clients: int = clients) -> dict[str, float]:
                there, short = up.get(name, behind[-1]), 4 if name == DIRECT else 1
                return measured(there, behind[0], stream, clients, seconds / short)

            load = f"{'stream' if stream else 'whole'}, {clients} clients"
            loads[load] = in_turns((*ALL, DIRECT), args.rounds, once, args.say, f"{load}, ")
    figures = [
        Comparison(seen).figure(f"router: {what}, {load}, laps / stock", LAPS, STOCK, (key,), bar)
        for load, seen in loads.items()
        for what, key, bar in (("requests/s", "per_s", bars.ROUTER_RATE), ("P99 latency", "p99_ms", bars.ROUTER_P99))
    ]
    title, note = "Routers in front of instant back ends", "CPU: of the router."
    text = (
        "Stock MiniLB, the LAPS router and SGLang's Rust gateway with the policies named, in front of the same "
        f"instant back ends, in turns; medians over {args.rounds} rounds."
    )
    tables = [table(loads, title, "reply, clients", COLUMNS, ALL, note)]
    data = {"loads": loads, "seconds": seconds, "prefill": PREFILLS, "decode": DECODES}
    return Piece("router-echo", "What the router costs", text, 0, tables, figures, data=data)


def run_workers(args: argparse.Namespace) -> Piece:
    """Run each number of router processes in front of the same back ends, without pinning."""
    one, many = names = [f"{n} worker{'s' if n > 1 else ''}" for n in WORKERS]
    loads, seconds = Loads(), args.seconds or 3.0
    with ExitStack() as stack:
        behind = stack.enter_context(back_ends(PREFILLS + DECODES, args.out))
        up = {
            name: servers.minilb(
                behind[:PREFILLS], behind[PREFILLS:], args.out / "logs" / f"router-workers-{n}.log",
                *FLAGS[LAPS], "--router-workers", str(n), module=MODULES[LAPS], name=name,
            )
            for n, name in zip(WORKERS, names, strict=True)
        }  # fmt: skip
        stack.enter_context(servers.running(*up.values()))
        for load in ("whole", "stream"):

            def once(_: int, name: str, stream: bool = load == "stream") -> dict[str, float]:
                return measured(up[name], behind[0], stream, WORKERS_CLIENTS, seconds, WARM_S)

            loads[load] = in_turns(names, args.rounds, once, args.say, f"{load}, ")
    seen = {load: Comparison(of) for load, of in loads.items()}
    figures = [
        of.figure(f"router: requests/s, {load}, {many} / one", many, one, ("per_s",), bars.ROUTER_WORKERS)
        for load, of in seen.items()
    ]
    failed = sum(sum(of.values(name, "failed")) for of in seen.values() for name in names)
    figures.append(Figure.of(f"router: requests that failed, {one} and {many}", failed, bars.NONE))
    busy = (Column(name.replace("_", " "), (f"{name}_cores",), ".2f") for name in ("router", "back_ends", "client"))
    note = "CPU ms: of all the router's processes together. The last three: cores kept busy."
    text = (
        f"The LAPS router with {one} and with {many} (`--router-workers`) in front of the same instant back ends, "
        f"{WORKERS_CLIENTS} clients, in turns; medians over {args.rounds} rounds. Back ends and load client run on the "
        f"same {psutil.cpu_count()} cores: what they keep busy is not left for the router."
    )
    tables = [table(loads, "One worker and several", "reply", (*COLUMNS, *busy), names, note)]
    data = {"loads": loads, "seconds": seconds, "clients": WORKERS_CLIENTS, "prefill": PREFILLS, "decode": DECODES}
    return Piece("router-workers", "What more router processes are worth", text, 0, tables, figures, data=data)
