"""The client: jobs replayed at their times, or as fast as so many clients can, over bare keep-alive connections.

A request asks for one token and no stream, so the time to its answer is the time to its first token.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from benchmark.rig.fast import Connection
from benchmark.serving.job import Job

IDLE_S = 3.0
"""A connection unused for longer is not used again: the server closes it after 5 s, perhaps just then."""


@dataclass(frozen=True)
class Target:
    """Where requests go."""

    host: str
    port: int

    @classmethod
    def of(cls, url: str) -> Target:
        """From ``http://host:port``. Raises ValueError."""
        parts = urlsplit(url if "//" in url else f"//{url}")
        if parts.scheme not in ("", "http") or not parts.hostname or parts.path.strip("/"):
            raise ValueError(f"{url!r} is not http://HOST:PORT")
        return cls(parts.hostname, parts.port or 80)

    @property
    def url(self) -> str:
        """Without a slash at its end."""
        return f"http://{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of one job. Seconds; ``sent_s`` counts from the start of the load."""

    job: Job
    sent_s: float
    late_s: float
    """How much later than due it was sent: the client's own fault."""
    ttft_s: float | None
    """None = failed."""


class Pool:
    """Keep-alive connections to one server."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._free: list[tuple[float, Connection]] = []
        self._all: list[Connection] = []

    async def take(self) -> Connection:
        """A connection nobody uses. Raises OSError."""
        now = time.perf_counter()
        while self._free:
            since, connection = self._free.pop()
            if connection.open and now - since < IDLE_S:
                return connection
        loop = asyncio.get_running_loop()
        connection = (await loop.create_connection(Connection, self._target.host, self._target.port))[1]
        self._all.append(connection)
        return connection

    def give(self, connection: Connection) -> None:
        """Done with it."""
        self._free.append((time.perf_counter(), connection))

    def close(self) -> None:
        """All of them."""
        for connection in self._all:
            connection.transport.close()


async def ask(pool: Pool, raw: bytes) -> bool:
    """Send one request; whether it was answered with 200."""
    try:
        connection = await pool.take()
    except OSError:
        return False
    answered: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    def done(_: Connection, ok: bool) -> None:
        if not answered.done():
            answered.set_result(ok)

    connection.send(raw, done)
    ok = await answered
    if ok:
        pool.give(connection)
    return ok


async def replay(target: Target, jobs: Sequence[Job], bodies: Sequence[bytes], patience_s: float) -> list[Answer]:
    """Send each job when it is due, whatever has come back by then; wait ``patience_s`` after the last was due.

    One that has no answer by then has failed.
    """
    pool = Pool(target)
    answered: list[asyncio.Event] = [asyncio.Event() for _ in jobs]
    seen: list[Answer | None] = [None] * len(jobs)
    epoch = time.perf_counter()

    async def one(i: int, job: Job, raw: bytes) -> None:
        if job.after is not None:
            await answered[job.after].wait()
        due = max(epoch + job.at_s, time.perf_counter())
        await asyncio.sleep(due - time.perf_counter())
        sent = time.perf_counter()
        late = max(0.0, sent - due)
        seen[i] = Answer(job, sent - epoch, late, None)
        if await ask(pool, raw):
            seen[i] = Answer(job, sent - epoch, late, time.perf_counter() - sent)
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
    return [s or Answer(job, job.at_s, 0.0, None) for s, job in zip(seen, jobs, strict=True)]


@dataclass
class Loop:
    """What a closed loop showed."""

    seconds: float
    """Counted, without the run-in."""
    answers: list[Answer] = field(default_factory=list)
    """Of the requests that ended in that time."""

    @property
    def failed(self) -> int:
        """How many."""
        return sum(a.ttft_s is None for a in self.answers)

    @property
    def rate(self) -> float:
        """Requests answered per second."""
        return (len(self.answers) - self.failed) / self.seconds


async def closed(
    target: Target, jobs: Sequence[Job], bodies: Sequence[bytes], clients: int, seconds: float, run_in_s: float = 0.3
) -> Loop:
    """``clients`` clients that send the next request, over and over the jobs, as soon as they have their answer."""
    pool, loop = Pool(target), Loop(seconds)
    work = itertools.cycle(zip(jobs, bodies, strict=True))
    epoch = time.perf_counter()
    begin = epoch + run_in_s
    end = begin + seconds

    async def client() -> None:
        while (sent := time.perf_counter()) < end:
            job, raw = next(work)
            ok = await ask(pool, raw)
            now = time.perf_counter()
            if begin <= now < end:
                loop.answers.append(Answer(job, sent - epoch, 0.0, now - sent if ok else None))
            if not ok:
                return

    await asyncio.gather(*(client() for _ in range(clients)))
    pool.close()
    return loop


async def one_by_one(target: Target, bodies: Sequence[bytes]) -> list[float]:
    """TTFT (seconds) of each request, sent alone. Raises ConnectionError if one fails."""
    pool, times = Pool(target), []
    for raw in bodies:
        begin = time.perf_counter()
        if not await ask(pool, raw):
            raise ConnectionError(f"a request to {target.url} failed")
        times.append(time.perf_counter() - begin)
    pool.close()
    return times
