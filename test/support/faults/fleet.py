"""Servers of a campaign: prefill and decode, each behind a proxy, and the routers in front."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from benchmark.rig import model, servers
from benchmark.rig.devices import CPU, DEVICES, free_gib
from faults import leftovers
from faults.evidence import Evidence
from faults.proxies import Proxy
from faults.schedule import DECODE, PREFILL

SHAPE = model.Shape(hidden=64, layers=4, heads=2, kv_heads=1, intermediate=176)
"""Small, fast model, because only faults are tested; its long batches can be paused."""
PREFILLS, DECODES, ROUTERS = 2, 2, 2
TOKENS = ("--max-total-tokens", "16384", "--context-length", "8192", "--disable-overlap-schedule")
KEY = "the key of a campaign"
"""Value of the servers' --admin-api-key and the routers' --api-key, needed to abort, flush or pause."""
PREFILL_ARGS = ("--enable-laps-scheduler", "--chunked-prefill-size", "256", *TOKENS)
SHORT_WAITS = {
    "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "30",
    "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "30",
    "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": "2",
}
"""Shorter limits (seconds) after which a server drops state of a dead peer; SGLang's time-outs default to 300."""
MAX_INFLIGHT = 96
LIMIT_S = 60.0
"""Value of --request-timeout-secs."""
ROUTER_ARGS = (
    "--enable-laps-alloc", "--request-timeout-secs", f"{LIMIT_S:.0f}", "--laps-rebalance-interval-s", "2",
    "--health-check-interval-secs", "2", "--health-check-timeout-secs", "3", "--health-failure-threshold", "2",
    "--max-concurrent-requests", str(MAX_INFLIGHT),
)  # fmt: skip
START_S = 300.0
HEAL_S = 60.0
REST_S = 90.0
"""Time within which all requests must end (seconds); servers stop waiting for a dead peer after ``SHORT_WAITS``."""


@dataclass
class Member:
    """One server behind its proxy."""

    role: str
    server: servers.Server
    proxy: Proxy
    processes: list[psutil.Process] = field(default_factory=list)
    """Processes of the server at the time when it became ready."""

    @property
    def name(self) -> str:
        """Return the server's name, as in the evidence."""
        return self.server.name


class Fleet:
    """Context manager that stops all processes on exit. ``open`` starts proxies and routers."""

    def __init__(self, out: Path, evidence: Evidence, seed: int, say: Callable[[str], None]) -> None:
        self.evidence, self._say, self.logs = evidence, say, out / "logs"
        shutil.rmtree(self.logs, ignore_errors=True)
        env = {**DEVICES[CPU].env, **SHORT_WAITS}
        folder = model.make(model.REPO / "out" / "models", SHAPE)
        room = free_gib(DEVICES[CPU])
        decodes = DECODES if room > DEVICES[CPU].server_gib * (PREFILLS + DECODES) else 1
        if decodes < DECODES:
            say("memory does not hold a second decode server: while the only one is down, requests are answered 503")
        self.members: list[Member] = []
        for role, number, args in ((PREFILL, PREFILLS, PREFILL_ARGS), (DECODE, decodes, TOKENS)):
            for i in range(number):
                name, log = f"{role} {i}", self.logs / f"{role}-{i}.log"
                server = servers.sglang(role, folder, log, *args, "--admin-api-key", KEY, env=env, name=name)
                proxy = Proxy(name, servers.free_port(), server.port, evidence, seed * 100 + len(self.members))
                self.members.append(Member(role, server, proxy))
        self._tokenizer = folder
        self.routers: list[servers.Server] = []
        self._router_processes: list[list[psutil.Process]] = []
        self._initial_descriptors: list[leftovers.Descriptors] = []
        """Descriptors of the routers before the first request."""

    def with_role(self, role: str) -> list[Member]:
        """Return the servers of a role."""
        return [m for m in self.members if m.role == role]

    @property
    def port(self) -> int:
        """Return the first router's port."""
        return self.router.port

    @property
    def router(self) -> servers.Server:
        """Return the first router, the target of router faults."""
        return self.routers[0]

    def __enter__(self) -> Fleet:
        try:
            for m in self.members:
                m.server.start()
            for m in self.members:
                self._say(f"starting {m.name}")
                m.server.ready(START_S)
                m.processes = m.server.family()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        # Kill, because a suspended process reacts to nothing else, and no answer is awaited any more.
        for server in (*self.routers, *(m.server for m in self.members)):
            server.kill()

    async def open(self) -> None:
        """Start the proxies, then the routers, and wait until they find every server healthy."""
        for m in self.members:
            await m.proxy.listen()
        module, more = "sglang_router_laps.launch_router", ("--laps-tokenizer", str(self._tokenizer))
        for i in range(ROUTERS):
            router = self._make_router(f"router-{i}.log", module, *ROUTER_ARGS, *more, "--api-key", KEY)
            router.key = KEY
            self.routers.append(router)
            await asyncio.to_thread(lambda router=router: router.start().ready(START_S))  # type: ignore[misc]
            self._router_processes.append(router.family())
        await self.find_unhealthy(HEAL_S)
        self._initial_descriptors = [self._count_descriptors(router) for router in self.routers]

    async def start_stock_router(self) -> servers.Server:
        """Start stock MiniLB in front of the same servers; the caller stops it."""
        server = self._make_router("stock.log", "sglang_router.launch_router", "--request-timeout-secs", "60")
        await asyncio.to_thread(lambda: server.start().ready(START_S))
        return server

    def _make_router(self, log: str, module: str, *args: str) -> servers.Server:
        # Routers get the ports of the proxies instead of the servers.
        prefills, decodes = (
            [replace(m.server, port=m.proxy.port, process=None) for m in self.with_role(role)]
            for role in (PREFILL, DECODE)
        )
        return servers.minilb(prefills, decodes, self.logs / log, *args, module=module)

    async def find_unhealthy(self, limit_s: float = 0.0, *names: str) -> set[str]:
        """Return the servers (of ``names``, default all) that a router still calls unhealthy after ``limit_s`` seconds.

        Retries for a minute, because a router without free descriptors does not answer. Raises OSError, ValueError.
        """
        begin = time.monotonic()
        while True:
            waited = time.monotonic() - begin
            try:
                statuses = await asyncio.to_thread(self.statuses)
            except (OSError, ValueError):
                if waited > HEAL_S:
                    raise
            else:
                instances = (i for status in statuses for i in (*status["prefill"], *status["decode"]))
                urls = {i["url"] for i in instances if not i["healthy"]}
                unhealthy = {m.name for m in self.members if m.proxy.url in urls and (not names or m.name in names)}
                if not unhealthy or waited >= limit_s:
                    return unhealthy
            await asyncio.sleep(0.5)

    def statuses(self) -> list[dict[str, Any]]:
        """Return each router's /laps_status. Raises OSError, ValueError."""
        return [router.laps_status() for router in self.routers]

    def find_dead_processes(self) -> list[str]:
        """Return the processes that ended without being killed."""
        up = [(m.server, m.processes) for m in self.members] + list(
            zip(self.routers, self._router_processes, strict=False)
        )
        return [
            f"{server.name}: process {p.pid}: {server.last_line()}"
            for server, kin in up
            for p in kin
            if not _is_running(p)
        ]

    async def wait_for_rest(self, limit_s: float) -> list[str]:
        """Wait until nothing is in flight and no KV token is held; return what remains after ``limit_s``."""
        end = time.monotonic() + limit_s
        while (found := await asyncio.to_thread(self._find_leftovers)) and time.monotonic() <= end:
            await asyncio.sleep(1.0)
        return found

    def _find_leftovers(self) -> list[str]:
        found = [x for m in self.members for x in _find_held_tokens(m)]
        try:
            for i, (router, before) in enumerate(zip(self.routers, self._initial_descriptors, strict=True)):
                found += [f"router {i}: {x}" for x in leftovers.find_in_status(router.laps_status())]
                found += [
                    f"router {i}: {x}"
                    for x in leftovers.find_extra_descriptors(self._count_descriptors(router), before)
                ]
        except (OSError, ValueError, psutil.Error) as e:
            found.append(f"router: {e}")
        return found

    def _count_descriptors(self, router: servers.Server) -> leftovers.Descriptors:
        assert router.process
        return leftovers.Descriptors.count(
            psutil.Process(router.process.pid), router.port, [m.proxy.port for m in self.members]
        )

    async def close(self) -> None:
        """Close the proxies."""
        for m in self.members:
            await m.proxy.close()


def _is_running(p: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return p.is_running() and p.status() != psutil.STATUS_ZOMBIE
    return False


def _find_held_tokens(m: Member) -> list[str]:
    try:
        busy = sum(x["num_running_reqs"] + x["num_waiting_reqs"] for x in _read_loads(m))
        if busy:
            return [f"{m.name}: {busy} requests running or waiting"]
        _send_request(m, "/flush_cache", "POST")
        held = sum(x["num_used_tokens"] for x in _read_loads(m))
        return [f"{m.name}: {held} KV tokens are held"] if held else []
    except urllib.error.HTTPError as e:
        return [f"{m.name}: {e.url.rpartition('/')[2]} answered {e.code}: {e.read()[:100]!r}"]
    except (OSError, ValueError, KeyError) as e:
        return [f"{m.name}: {type(e).__name__}: {e}"]


def _read_loads(m: Member) -> Any:
    return json.loads(_send_request(m, "/v1/loads?include=core"))["loads"]


def _send_request(m: Member, path: str, method: str = "GET") -> bytes:
    request = urllib.request.Request(m.server.url + path, method=method, headers=servers.bearer(KEY))
    with urllib.request.urlopen(request, timeout=30) as reply:
        return bytes(reply.read())
