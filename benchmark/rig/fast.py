"""A client that costs little: whole requests prepared beforehand, bare keep-alive connections, one process.

On a machine of two cores a costly client is itself what a closed loop measures.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from benchmark.rig.servers import FAKE_BOOTSTRAP_HOST, HOST

VOCAB = (3, 2000)
"""Token ids used: those of the small model without its special ones."""
Done = Callable[["Connection", bool], None]


def request(body: dict[str, Any]) -> bytes:
    """A POST /generate as it goes over the wire."""
    raw = orjson.dumps(body)
    head = b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % len(raw) + raw


def prefill(tokens: int, rng: random.Random, slo_ms: float | None = None) -> bytes:
    """A prefill of ``tokens`` random ids that needs no decode server; its reply is the first token.

    ``slo_ms``: its own deadline for that (ms).
    """
    params: dict[str, Any] = {"max_new_tokens": 1, "temperature": 0}
    if slo_ms is not None:
        params["custom_params"] = {"ttft_slo_ms": slo_ms}
    return request(
        {
            "input_ids": [rng.randrange(*VOCAB) for _ in range(tokens)],
            "sampling_params": params,
            "bootstrap_host": FAKE_BOOTSTRAP_HOST,
            "bootstrap_port": 1,
            "bootstrap_room": rng.getrandbits(60),
        }
    )


class Connection(asyncio.Protocol):
    """One keep-alive connection: one request at a time, ``done`` when its reply is whole or the peer has gone."""

    def __init__(self) -> None:
        self.transport: Any = None
        self.open = True
        self._buffer = b""
        self._done: Done | None = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def send(self, raw: bytes, done: Done) -> None:
        """Send a whole request."""
        self._buffer, self._done = b"", done
        self.transport.write(raw)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head = self._buffer.find(b"\r\n\r\n")
        if head < 0 or self._done is None:
            return
        lower = self._buffer[:head].lower()
        length = int(lower[lower.index(b"content-length:") + 15 :].split(b"\r\n", 1)[0])
        if len(self._buffer) >= head + 4 + length:
            self._finish(self._buffer.startswith(b"HTTP/1.1 200"))

    def connection_lost(self, _: Exception | None) -> None:
        self.open = False
        self._finish(False)

    def _finish(self, ok: bool) -> None:
        done, self._done = self._done, None
        if done:
            done(self, ok)


async def connect(port: int) -> Connection:
    """A connection to ``port`` of loopback."""
    return (await asyncio.get_running_loop().create_connection(Connection, HOST, port))[1]


@dataclass
class Loop:
    """What a closed loop showed."""

    seconds: float
    """Counted, without the run-in."""
    ttft_s: list[float] = field(default_factory=list)
    """Of the requests answered in that time."""
    failed: int = 0

    @property
    def rate(self) -> float:
        """Requests answered per second."""
        return len(self.ttft_s) / self.seconds


async def closed_loop(port: int, bodies: Iterator[bytes], clients: int, seconds: float, run_in_s: float = 0.3) -> Loop:
    """``clients`` connections that each send the next request as soon as they have their answer."""
    loop = Loop(seconds)
    connections = [await connect(port) for _ in range(clients)]
    begin = time.perf_counter() + run_in_s
    end = begin + seconds
    left = clients
    over = asyncio.get_running_loop().create_future()

    def go(connection: Connection) -> None:
        sent = time.perf_counter()

        def done(connection: Connection, ok: bool) -> None:
            nonlocal left
            now = time.perf_counter()
            loop.failed += not ok
            if ok and begin <= now < end:
                loop.ttft_s.append(now - sent)
            if ok and now < end:
                go(connection)
                return
            left -= 1
            if not left and not over.done():
                over.set_result(None)

        connection.send(next(bodies), done)

    for connection in connections:
        go(connection)
    await over
    for connection in connections:
        connection.transport.close()
    return loop


async def one_by_one(port: int, bodies: Iterable[bytes], pause_s: float = 0.0) -> list[float]:
    """TTFT (seconds) of each request, sent alone. Raises ConnectionError if one fails."""
    connection = await connect(port)
    times = []
    for raw in bodies:
        answered: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        begin = time.perf_counter()
        connection.send(raw, lambda _, ok, to=answered: to.set_result(ok))  # type: ignore[misc]
        if not await answered:
            raise ConnectionError(f"a request to port {port} failed")
        times.append(time.perf_counter() - begin)
        if pause_s:
            await asyncio.sleep(pause_s)
    connection.transport.close()
    return times


@dataclass(frozen=True)
class Arrival:
    """One request of an open load."""

    at_s: float
    kind: str
    raw: bytes


async def open_loop(port: int, arrivals: Sequence[Arrival]) -> list[tuple[str, float | None]]:
    """Send each at its time, whatever has come back by then: (kind, TTFT in seconds; None = failed), in order."""
    free: list[Connection] = []
    seen: list[tuple[str, float | None]] = [(a.kind, None) for a in arrivals]
    left = len(arrivals)
    over = asyncio.get_running_loop().create_future()
    epoch = time.perf_counter()

    def send(i: int, connection: Connection) -> None:
        sent = time.perf_counter()

        def done(connection: Connection, ok: bool) -> None:
            nonlocal left
            if ok:
                seen[i] = (seen[i][0], time.perf_counter() - sent)
                free.append(connection)
            left -= 1
            if not left:
                over.set_result(None)

        connection.send(arrivals[i].raw, done)

    for i, arrival in enumerate(arrivals):
        wait_s = epoch + arrival.at_s - time.perf_counter()
        if wait_s > 0:
            await asyncio.sleep(wait_s)
        # The server closes a connection that was not used for a while.
        while free and not free[-1].open:
            free.pop()
        send(i, free.pop() if free else await connect(port))
    if arrivals:
        await over
    for connection in free:
        connection.transport.close()
    return seen
