"""Faults inflicted on a fleet. Each fault records its start and end and restores everything."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import resource
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any

import psutil

from benchmark.rig.servers import HOST, bearer
from faults import wire
from faults.clients import exchange, run_with_limit
from faults.fleet import HEAL_S, KEY, MAX_INFLIGHT, START_S, Fleet, Member
from faults.oracle import RequestRecord
from faults.prompts import GENERATE
from faults.proxies import PASS
from faults.schedule import DECODE, PREFILL, ROUTER, SERVER_FAULTS, Fault

SPARE_DESCRIPTORS = 12
"""Descriptors that the router may still open when its limit is lowered."""
NOTICE_S = SERVER_FAULTS["kill"][0]
"""Time in which a decode server that runs notices a dead prefill server (seconds)."""


class Inflictor:
    """Inflicts the faults of a schedule. ``done`` counts (lane, kind)."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._over = asyncio.Event()
        self._starting = asyncio.Lock()
        self._resumed = -math.inf
        """Time at which a stopped server last went on."""
        self.done: Counter[tuple[str, str]] = Counter()
        self.now: dict[str, str] = {}
        """Lane -> current fault, in words."""
        self.wrong: list[str] = []
        """Failures to recover from a fault, and wrong reactions to a fault elsewhere."""

    async def lane(self, faults: Iterator[Fault]) -> None:
        """Inflict one fault after the other until ``end`` is called."""
        later: list[Fault] = []
        for fault in faults:
            if fault.kind == "kill" and self._starting.locked() and not later:
                later.append(fault)
                continue
            if later and not self._starting.locked() and not self._over.is_set():
                await self._inflict(later.pop())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(fault.gap_s):
                    await self._over.wait()
                    return
            await self._inflict(fault)

    def end(self) -> None:
        """Start no more faults; current faults run to their end."""
        self._over.set()

    async def _inflict(self, fault: Fault) -> None:
        members = self._fleet.with_role(fault.lane)
        target = members[fault.target % len(members)] if members else None
        name = target.name if target else ""
        self.now[fault.lane] = f"{fault.kind} {name or ROUTER}"
        try:
            # Servers that start at the same time compete for the cores for minutes.
            async with self._starting if fault.kind == "kill" else contextlib.nullcontext():
                with self._fleet.evidence.window(fault.kind, name):
                    async with getattr(self, f"_{fault.kind}", self._proxy)(target, fault.kind):
                        await asyncio.sleep(fault.length_s)
                    for unhealthy in await self._fleet.find_unhealthy(HEAL_S, name):
                        self.wrong.append(
                            f"the router still calls {unhealthy} unhealthy {HEAL_S:.0f} s after its fault"
                        )
            self.done[fault.lane, fault.kind] += 1
        finally:
            del self.now[fault.lane]

    @contextlib.asynccontextmanager
    async def _proxy(self, m: Any, kind: str) -> AsyncIterator[None]:
        await m.proxy.mode(kind)
        yield
        await m.proxy.mode(PASS)

    @contextlib.asynccontextmanager
    async def _kill(self, m: Member, _: str) -> AsyncIterator[None]:
        m.processes = []
        await asyncio.to_thread(m.server.kill)
        m.proxy.refuse()
        yield
        if m.role == PREFILL:
            await self._wait_until_decode_servers_notice()
        m.server.log.rename(m.server.log.with_suffix(f".{time.time_ns()}.log"))
        # In a thread, because on a slow disk the start takes seconds, and every proxy would stall.
        await asyncio.to_thread(m.server.start)
        begin = time.monotonic()
        while (status := (await _send_request(m.server.port, "/health", method="GET", limit_s=10.0)).status) != 200:
            if not m.server.alive() or time.monotonic() - begin > START_S:
                raise RuntimeError(f"{m.name} does not start again: {m.server.last_line()}")
            if status:
                # The server now answers that it is not ready; the router should see this answer, too.
                await m.proxy.listen()
            await asyncio.sleep(0.2)
        await m.proxy.listen()
        m.processes = m.server.family()

    async def _wait_until_decode_servers_notice(self) -> None:
        """Wait until no decode server has been stopped for ``NOTICE_S``: a stopped one counts no missed heartbeats."""
        while self.now.get(DECODE, "").startswith("stop") or time.monotonic() - self._resumed < NOTICE_S:
            await asyncio.sleep(0.2)

    @contextlib.asynccontextmanager
    async def _stop(self, m: Member, _: str) -> AsyncIterator[None]:
        family = m.server.family()
        try:
            for p in family:
                p.suspend()
            yield
        finally:
            for p in family:
                with contextlib.suppress(psutil.Error):
                    p.resume()
            self._resumed = time.monotonic()

    @contextlib.asynccontextmanager
    async def _pause(self, m: Member, kind: str) -> AsyncIterator[None]:
        """Pause generation as an operator does, in turn with ``in_place`` (keeps the KV) and ``retract`` (frees it)."""
        await self._post(m, "/pause_generation", mode=("in_place", "retract")[self.done[m.role, kind] % 2])
        yield
        await self._post(m, "/continue_generation")

    async def _post(self, m: Member, path: str, **body: Any) -> None:
        record = await _send_request(m.server.port, path, json.dumps(body).encode())
        if record.status != 200:
            self.wrong.append(f"{path} of {m.name} answered {record.status}: {record.reason} {record.broken}")

    @contextlib.asynccontextmanager
    async def _descriptors(self, router: None, kind: str) -> AsyncIterator[None]:
        """Lower the router's descriptor limit to slightly above its use, and take up the rest with idle connections."""
        assert self._fleet.router.process
        pid = self._fleet.router.process.pid
        before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        with contextlib.ExitStack() as stack:
            used = psutil.Process(pid).num_fds()
            unhealthy = await self._fleet.find_unhealthy()
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (used + SPARE_DESCRIPTORS, before[1]))
            stack.callback(resource.prlimit, pid, resource.RLIMIT_NOFILE, before)
            for _ in range(3 * SPARE_DESCRIPTORS):
                with contextlib.suppress(OSError, TimeoutError):
                    async with asyncio.timeout(1.0):
                        stack.callback((await asyncio.open_connection(HOST, self._fleet.port))[1].close)
            yield
        now = time.monotonic()
        at_fault = {w.server for w in self._fleet.evidence.active(now - 20.0, now, 20.0)}
        for name in await self._fleet.find_unhealthy() - unhealthy - at_fault:
            self.wrong.append(f"the router called {name} unhealthy when its own descriptors were used up")

    @contextlib.asynccontextmanager
    async def _halves(self, router: None, kind: str) -> AsyncIterator[None]:
        """Send more half requests than the router admits at once; other requests must not suffer."""
        raw = f"POST {GENERATE} HTTP/1.1\r\nhost: {HOST}\r\ncontent-length: 500\r\n\r\n{{".encode()
        with contextlib.ExitStack() as stack:
            for _ in range(MAX_INFLIGHT + 8):
                with contextlib.suppress(OSError):
                    writer = (await asyncio.open_connection(HOST, self._fleet.port))[1]
                    stack.callback(writer.close)
                    writer.write(raw)
            yield

    @contextlib.asynccontextmanager
    async def _flush(self, router: None, kind: str) -> AsyncIterator[None]:
        record = await _send_request(self._fleet.port, "/flush_cache", limit_s=30.0)
        if (record.status or 0) >= 500 and not self.now.keys() - {ROUTER}:
            self.wrong.append(f"/flush_cache answered {record.status}")
        yield


async def _send_request(
    port: int, path: str, body: bytes = b"", method: str = "POST", limit_s: float | None = None
) -> RequestRecord:
    record = RequestRecord(0, path)
    return await run_with_limit(exchange(port, wire.request(path, body, bearer(KEY), method), record), record, limit_s)
