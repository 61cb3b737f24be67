"""Benefit of several router processes behind one port over one, in front of instant back ends."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import psutil
import uvloop

from benchmark.load import client
from benchmark.load.connection import Target, request
from benchmark.results import bars
from benchmark.results.piece import Figure, Piece, Table
from benchmark.results.rounds import in_turns, ratio
from benchmark.rig import servers
from benchmark.suites.router import FLAGS, LAPS, MODULES
from benchmark.suites.router.echo import DECODES, PREFILLS, back_ends

WORKERS = (1, 4)
CLIENTS = 32
WARM_S = 0.5
"""Warm-up in every round, in which each worker opens its connections to the servers: idle ones are closed between
rounds."""
Round = dict[str, float]


def cpu_s(processes: Sequence[psutil.Process]) -> float:
    """Return the CPU time of the processes so far (seconds)."""
    return sum(t.user + t.system for t in (p.cpu_times() for p in processes))


def measured(router: servers.Server, behind: servers.Server, body: bytes, seconds: float) -> Round:
    """Run one round, with the cores that router, back ends and client keep busy."""
    at = {"router": router.family(), "back_ends": behind.family(), "client": [psutil.Process()]}
    target = Target(servers.HOST, router.port)
    uvloop.run(client.closed(target, [body], CLIENTS, WARM_S, run_in_s=0.0))
    before = {name: cpu_s(processes) for name, processes in at.items()}
    loop = uvloop.run(client.closed(target, [body], CLIENTS, seconds, run_in_s=0.0))
    if not loop.whole_s:
        raise ConnectionError(f"{router.name} answered nothing")
    steady = loop.steady.require(router.name)
    spent = {name: cpu_s(processes) - before[name] for name, processes in at.items()}
    return {
        "per_s": steady.requests_per_s,
        "clients": steady.clients,
        "mean_ttft_s": steady.mean_ttft_s,
        "littles_ratio": steady.littles_ratio,
        "p99_ms": 1e3 * float(np.quantile(loop.whole_s, 0.99)),
        "failed": loop.failed,
        "cpu_ms": 1e3 * spent["router"] / len(loop.asked),
        **{f"{name}_cores": s / seconds for name, s in spent.items()},
    }


def run(out: Path, rounds: int, seconds: float, say: Callable[[str], None]) -> Piece:
    """Run each number of workers in front of the same back ends, without pinning."""
    with ExitStack() as stack:
        behind = stack.enter_context(back_ends(PREFILLS + DECODES, out))
        up = {
            _name(n): servers.minilb(
                behind[:PREFILLS], behind[PREFILLS:], out / "logs" / f"router-workers-{n}.log",
                *FLAGS[LAPS], "--router-workers", str(n), module=MODULES[LAPS], name=_name(n),
            )
            for n in WORKERS
        }  # fmt: skip
        stack.enter_context(servers.running(*up.values()))
        loads = {}
        for stream in (False, True):
            load = "stream" if stream else "whole"
            body = request({"text": "hello, how are you?", "sampling_params": {"max_new_tokens": 8}, "stream": stream})

            def once(_: int, name: str, body: bytes = body) -> Round:
                return measured(up[name], behind[0], body, seconds)

            loads[load] = in_turns(list(up), rounds, once, say, f"{load}, ")
    return piece(loads, rounds, seconds)


def _name(workers: int) -> str:
    return f"{workers} worker{'s' if workers > 1 else ''}"


def piece(loads: dict[str, dict[str, list[Round]]], rounds: int, seconds: float) -> Piece:
    """Return the piece for the report."""
    one, many = map(_name, WORKERS)
    columns = (("per_s", 0), ("p99_ms", 1), ("cpu_ms", 2), ("router_cores", 2), ("back_ends_cores", 2))
    rows, figures = [], []
    for load, seen in loads.items():
        for name, turns in seen.items():
            cells = (f"{statistics.median(r[key] for r in turns):.{k}f}" for key, k in (*columns, ("client_cores", 2)))
            rows.append((load, name, *cells))
        rates = {name: [r["per_s"] for r in turns] for name, turns in seen.items()}
        figures.append(
            Figure.of(f"router: requests/s, {load}, {many} / one", ratio(rates[many], rates[one]), bars.ROUTER_WORKERS)
        )
    failed = sum(r["failed"] for seen in loads.values() for turns in seen.values() for r in turns)
    figures.append(Figure.of(f"router: requests that failed, {one} and {many}", failed, bars.NONE))
    heads = ("reply", "router", "requests/s", "P99 ms", "CPU ms a request", "router", "back ends", "client")
    note = "CPU ms: of all the router's processes together. The last three: cores kept busy."
    return Piece(
        name="router-workers",
        title="What more router processes are worth",
        text=f"The LAPS router with {one} and with {many} (`--router-workers`) in front of the same instant back ends, "
        f"{CLIENTS} clients, in turns; medians over {rounds} rounds. Back ends and load client run on the same "
        f"{psutil.cpu_count()} cores: what they keep busy is not left for the router.",
        seed=0,
        tables=[Table("One worker and several", heads, rows, note)],
        figures=figures,
        data={"loads": loads, "seconds": seconds, "clients": CLIENTS, "prefill": PREFILLS, "decode": DECODES},
    )
