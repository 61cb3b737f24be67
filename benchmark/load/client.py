"""HTTP client that replays jobs at their times, or in closed loops, over bare keep-alive connections.

A request asks for one token without streaming, or for a stream. In both cases, the TTFT is the time to the first byte
of the answer's body.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from laps_plan.traffic.job import Job
from laps_plan.traffic.little import Asked, Steady, steady

from benchmark.load.connection import Connection, Target

UNANSWERED = "no answer in time"
"""Error of a request without an answer when waiting ended."""
IDLE_S = 3.0
"""Idle time after which a connection is not reused (seconds): after 5 s the server closes it, perhaps during a send."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Outcome of one job. Times in seconds; ``sent_s`` counts from the start of the load."""

    job: Job
    sent_s: float
    late_s: float
    """Delay of sending caused by the client itself."""
    ttft_s: float | None
    """None if the request failed."""
    error: str = ""
    """Error message of a failed request."""


class Pool:
    """Keep-alive connections to one server."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._free: list[tuple[float, Connection]] = []
        self._all: list[Connection] = []

    async def ask(self, raw: bytes) -> tuple[float | None, str]:
        """Send one request. Returns its TTFT (seconds), or None and the error."""
        begin = None
        while True:
            try:
                connection, reused = await self._take()
            except OSError as e:
                return None, str(e)
            begin = begin or time.perf_counter()
            if await connection.answered(raw):
                now = time.perf_counter()
                self._free.append((now, connection))
                return (connection.first or now) - begin, ""
            # If this client stood still, a server has closed connections that were idle for longer than it seems here.
            if not (reused and connection.silent):
                return None, connection.said

    async def _take(self) -> tuple[Connection, bool]:
        """Return an unused connection, and True if it has carried other requests. Raises OSError."""
        now = time.perf_counter()
        while self._free:
            since, connection = self._free.pop()
            if connection.open and now - since < IDLE_S:
                return connection, True
        self._all.append(await Connection.to(self._target))
        return self._all[-1], False

    def close(self) -> None:
        for connection in self._all:
            connection.transport.close()


Route = Callable[[Job, bytes], tuple[bytes, Callable[[], None]]]
"""Function that returns the bytes to send for a job that is due now, and a function to call after the answer."""


async def replay(
    target: Target, jobs: Sequence[Job], bodies: Sequence[bytes], patience_s: float, route: Route | None = None
) -> list[Answer]:
    """Send each job at its time. A job with ``job.after`` also waits for the answer of that job, and for its pause.

    A job without an answer ``patience_s`` after the last job's time has failed. ``route``: completes requests.
    """
    pool = Pool(target)
    answered: list[asyncio.Event] = [asyncio.Event() for _ in jobs]
    seen: list[Answer | None] = [None] * len(jobs)
    epoch = time.perf_counter()

    async def one(i: int, job: Job, raw: bytes) -> None:
        if job.after is not None:
            await answered[job.after].wait()
            await asyncio.sleep(job.pause_s)
        due = max(epoch + job.at_s, time.perf_counter())
        await asyncio.sleep(due - time.perf_counter())
        sent = time.perf_counter()
        late = max(0.0, sent - due)
        seen[i] = Answer(job, sent - epoch, late, None, UNANSWERED)
        whole, done = route(job, raw) if route else (raw, lambda: None)
        seen[i] = Answer(job, sent - epoch, late, *await pool.ask(whole))
        done()
        answered[i].set()

    tasks = [asyncio.ensure_future(one(i, *pair)) for i, pair in enumerate(zip(jobs, bodies, strict=True))]
    if tasks:
        last = max(job.at_s for job in jobs)
        done, late = await asyncio.wait(tasks, timeout=last + patience_s)
        for task in late:
            task.cancel()
        for task in done:
            task.result()
    pool.close()
    return [s or Answer(job, job.at_s, 0.0, None, "never sent") for s, job in zip(seen, jobs, strict=True)]


@dataclass
class Loop:
    """Result of a closed loop."""

    clients: int
    begin_s: float
    end_s: float
    """Requests sent from ``begin_s`` to this time are counted, and their answers awaited."""
    asked: list[Asked] = field(default_factory=list)
    failed: int = 0

    @property
    def counted(self) -> list[Asked]:
        """Return the requests sent between ``begin_s`` and ``end_s``."""
        return [a for a in self.asked if self.begin_s <= a.sent_s < self.end_s]

    @property
    def ttft_s(self) -> list[float]:
        """Return times to first token of the counted requests (seconds)."""
        return [a.ttft_s for a in self.counted]

    @property
    def whole_s(self) -> list[float]:
        """Return times to the complete answers of the counted requests (seconds); without streaming the same as
        ``ttft_s``."""
        return [a.took_s for a in self.counted]

    @property
    def steady(self) -> Steady:
        """Return request rate, mean TTFT and Little's ratio over whole cycles."""
        return steady(self.asked, self.clients, self.begin_s, self.end_s)


async def closed(
    target: Target,
    bodies: Iterable[bytes],
    clients: int,
    seconds: float,
    run_in_s: float = 0.3,
    tokens: Sequence[int] = (0,),
) -> Loop:
    """Run ``clients`` clients in a closed loop, until all requests sent in ``seconds`` after the run-in are answered.
    If ``seconds`` is infinite, send each body once, without a run-in. ``tokens``: new tokens of each body.

    A client stops if its request fails. Raises OSError if no server listens.
    """
    once, pairs = math.isinf(seconds), zip(bodies, itertools.cycle(tokens))
    work, left = iter(pairs) if once else itertools.cycle(pairs), clients
    connections = [await Connection.to(target) for _ in range(clients)]
    over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    begin = time.perf_counter() + (0.0 if once else run_in_s)
    loop, waited_for = Loop(clients, begin, begin + seconds), 0

    # Callbacks instead of a task per client: on two cores the client's own time is part of the measurement.
    def go(client: int, connection: Connection) -> None:
        nonlocal waited_for
        found = next(work, None)
        if found is None:
            ended()
            return
        raw, new = found
        sent = time.perf_counter()
        counts = loop.begin_s <= sent < loop.end_s
        waited_for += counts

        def done(connection: Connection, ok: bool) -> None:
            nonlocal waited_for
            now = time.perf_counter()
            loop.failed += not ok
            waited_for -= counts
            if ok:
                loop.asked.append(Asked(client, sent, now - sent, (connection.first or now) - sent, new))
            if ok and (now < loop.end_s or waited_for):
                go(client, connection)
            else:
                ended()

        connection.send(raw, done)

    def ended() -> None:
        nonlocal left
        left -= 1
        if not left and not over.done():
            over.set_result(None)

    for i, connection in enumerate(connections):
        go(i, connection)
    await over
    loop.end_s = min(loop.end_s, time.perf_counter())
    for connection in connections:
        connection.transport.close()
    return loop


async def one_by_one(target: Target, bodies: Iterable[bytes]) -> list[float]:
    """Send each request alone; return the TTFTs (seconds). Raises ConnectionError if a request fails."""
    pool, times = Pool(target), []
    for raw in bodies:
        took, why = await pool.ask(raw)
        if took is None:
            raise ConnectionError(f"a request to {target.url} failed: {why.splitlines()[0]}")
        times.append(took)
    pool.close()
    return times
