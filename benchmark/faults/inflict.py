"""Faults, done to a fleet: each notes its begin and its end, and leaves everything as it was."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import psutil

from benchmark.faults import proxies, wire
from benchmark.faults.fleet import MAX_INFLIGHT, START_S, Fleet, Member
from benchmark.faults.prompts import GENERATE
from benchmark.faults.schedule import ROUTER, Fault
from benchmark.rig.servers import HOST

SPARE_DESCRIPTORS = 12
"""What the router may still open when its limit is lowered."""
HEAL_S = 60.0


class Inflictor:
    """Does what a schedule says. ``done`` counts (lane, kind)."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._over = asyncio.Event()
        self._starting = asyncio.Lock()
        self.done: Counter[tuple[str, str]] = Counter()
        self.now: dict[str, str] = {}
        """Lane -> the fault that lasts, in words."""
        self.wrong: list[str] = []
        """What did not recover from a fault, or took offence at one that was none of its business."""

    async def lane(self, faults: Iterator[Fault]) -> None:
        """One fault after the other, until ``end``."""
        later: list[Fault] = []
        for fault in faults:
            if fault.kind == "kill" and self._starting.locked() and not later:
                later.append(fault)
                continue
            if later and not self._starting.locked():
                await self._inflict(later.pop())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(fault.gap_s):
                    await self._over.wait()
                    return
            await self._inflict(fault)

    def end(self) -> None:
        """No more faults; those that last are brought to their end."""
        self._over.set()

    async def _inflict(self, fault: Fault) -> None:
        members = self._fleet.of(fault.lane)
        member = members[fault.target % len(members)] if members else None
        self.now[fault.lane] = f"{fault.kind} {member.name if member else ROUTER}"
        try:
            if member:
                await getattr(self, f"_{fault.kind}")(member, fault)
            else:
                await getattr(self, f"_{fault.kind}")(fault)
            self.done[fault.lane, fault.kind] += 1
        finally:
            del self.now[fault.lane]

    async def _kill(self, m: Member, fault: Fault) -> None:
        # Servers that start at the same time take each other's cores for minutes.
        async with self._starting:
            await self._kill_alone(m, fault)

    async def _kill_alone(self, m: Member, fault: Fault) -> None:
        with self._fleet.evidence.window("kill", m.name):
            m.kin = []
            await asyncio.to_thread(m.server.kill)
            m.proxy.refuse()
            await asyncio.sleep(fault.length_s)
            m.bury()
            m.server.start()
            await self._until(m, lambda: _listens(m.server.port))
            await m.proxy.listen()
            await self._until(m, lambda: _serves(m.server.port))
            m.kin = m.server.family()
            await self._healed(m)

    async def _until(self, m: Member, true: Callable[[], Awaitable[bool]]) -> None:
        begin = time.monotonic()
        while not await true():
            if not m.server.alive() or time.monotonic() - begin > START_S:
                raise RuntimeError(f"{m.name} does not start again: {m.server.last_line()}")
            await asyncio.sleep(0.2)

    async def _stop(self, m: Member, fault: Fault) -> None:
        with self._fleet.evidence.window("stop", m.name):
            family = m.server.family()
            try:
                for p in family:
                    p.suspend()
                await asyncio.sleep(fault.length_s)
            finally:
                for p in family:
                    with contextlib.suppress(psutil.Error):
                        p.resume()
            await self._healed(m)

    async def _refuse(self, m: Member, fault: Fault) -> None:
        with self._fleet.evidence.window("refuse", m.name):
            m.proxy.refuse()
            await asyncio.sleep(fault.length_s)
            await m.proxy.listen()
            await self._healed(m)

    async def _reset(self, m: Member, fault: Fault) -> None:
        await self._mode(m, fault, proxies.RESET)

    async def _silent(self, m: Member, fault: Fault) -> None:
        await self._mode(m, fault, proxies.SILENT)

    async def _storm(self, m: Member, fault: Fault) -> None:
        await self._mode(m, fault, proxies.STORM)

    async def _mode(self, m: Member, fault: Fault, mode: str) -> None:
        with self._fleet.evidence.window(mode, m.name):
            m.proxy.mode(mode)
            await asyncio.sleep(fault.length_s)
            m.proxy.mode(proxies.PASS)
            await self._healed(m)

    async def _pause(self, m: Member, fault: Fault) -> None:
        """As an operator does; ``retract`` gives the KV back, ``in_place`` keeps it."""
        mode = ("in_place", "retract")[fault.target // 2 % 2]
        with self._fleet.evidence.window("pause", m.name):
            await self._post(m, "/pause_generation", {"mode": mode})
            await asyncio.sleep(fault.length_s)
            await self._post(m, "/continue_generation", {})

    async def _post(self, m: Member, path: str, body: dict[str, Any]) -> None:
        with await wire.Connection.to(m.server.port) as connection:
            await connection.send(wire.request(path, json.dumps(body).encode()))
            async with asyncio.timeout(60.0):
                reply = await connection.reply()
                if reply.status != 200:
                    self.wrong.append(f"{path} of {m.name} answered {reply.status}: {(await reply.body())[:200]!r}")

    async def _descriptors(self, fault: Fault) -> None:
        """Its limit is lowered to a few more than it has open, and idle connections take those."""
        assert self._fleet.router
        assert self._fleet.router.process
        pid = self._fleet.router.process.pid
        before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._fleet.evidence.window("descriptors"))
            used = psutil.Process(pid).num_fds()
            sick = await self._sick()
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (used + SPARE_DESCRIPTORS, before[1]))
            stack.callback(resource.prlimit, pid, resource.RLIMIT_NOFILE, before)
            for _ in range(3 * SPARE_DESCRIPTORS):
                with contextlib.suppress(OSError, TimeoutError):
                    async with asyncio.timeout(1.0):
                        stack.callback((await wire.Connection.to(self._fleet.port)).close)
            await asyncio.sleep(fault.length_s)
        for name in await self._sick() - sick - self._at_fault():
            self.wrong.append(f"the router called {name} unhealthy when its own descriptors were used up")

    async def _sick(self) -> set[str]:
        """Whom the router calls unhealthy. Nobody hears it while its descriptors are used up: ask again."""
        end = time.monotonic() + HEAL_S
        while True:
            try:
                status = await asyncio.to_thread(self._fleet.status)
                break
            except (OSError, ValueError):
                if time.monotonic() > end:
                    raise
                await asyncio.sleep(0.5)
        sick = [i["url"] for i in (*status["prefill"], *status["decode"]) if not i["healthy"]]
        return {m.name for m in self._fleet.members if m.proxy.url in sick}

    def _at_fault(self) -> set[str]:
        now = time.monotonic()
        return {w.server for w in self._fleet.evidence.active(now - 20.0, now, 20.0)}

    async def _halves(self, fault: Fault) -> None:
        """More half-sent requests than it takes at once; others must not suffer."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._fleet.evidence.window("halves"))
            raw = f"POST {GENERATE} HTTP/1.1\r\nhost: {HOST}\r\ncontent-length: 500\r\n\r\n{{".encode()
            for _ in range(MAX_INFLIGHT + 8):
                with contextlib.suppress(OSError):
                    connection = await wire.Connection.to(self._fleet.port)
                    stack.callback(connection.close)
                    await connection.send(raw)
            await asyncio.sleep(fault.length_s)

    async def _flush(self, _: Fault) -> None:
        with contextlib.suppress(OSError, wire.Broken, TimeoutError):
            async with asyncio.timeout(30.0):
                with await wire.Connection.to(self._fleet.port) as connection:
                    await connection.send(wire.request("/flush_cache", b""))
                    reply = await connection.reply()
                    if reply.status >= 500 and not self.now.keys() - {ROUTER}:
                        self.wrong.append(f"/flush_cache answered {reply.status}")

    async def _healed(self, m: Member) -> None:
        """Wait until the router calls it healthy again."""
        end = time.monotonic() + HEAL_S
        while m.name in await self._sick():
            if time.monotonic() > end:
                self.wrong.append(f"the router still calls {m.name} unhealthy {HEAL_S:.0f} s after its fault")
                return
            await asyncio.sleep(0.5)


async def _listens(port: int) -> bool:
    with contextlib.suppress(OSError):
        (await wire.Connection.to(port)).close()
        return True
    return False


async def _serves(port: int) -> bool:
    with contextlib.suppress(OSError, wire.Broken, TimeoutError):
        async with asyncio.timeout(10.0):
            with await wire.Connection.to(port) as connection:
                await connection.send(wire.request("/health", b"", method="GET"))
                return (await connection.reply()).status == 200
    return False
