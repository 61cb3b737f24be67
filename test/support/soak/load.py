"""Endless mixed load: one workload after the other, with streams and whole answers, chats, aborts and disconnects."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from faults import wire
from faults.clients import exchange, run_with_limit
from faults.oracle import RequestRecord
from faults.prompts import CHAT, COMPLETIONS, GENERATE
from laps_plan.traffic import named
from laps_plan.traffic.job import Job
from laps_plan.traffic.named import Offer, Scale

from benchmark.rig import model

WORKLOADS = ("turns", "mixed", "azure", "code", "lmsys", "whale", "mooncake")
SEGMENT_S = 30.0
"""Duration of each workload before the next one starts (seconds)."""
SCALE = Scale(longest=4096, long=2048)
LONE_S_PER_TOKEN = 1e-4
"""Lone prefill time per token (seconds) on the machine that the rate is meant for; sets the distance of whales."""
SETS = 4
"""Rounds of all workloads after which conversations and documents repeat. Then some are cached on the
device, some on the host, some nowhere."""
MAX_IN_FLIGHT = 16
"""Most requests in flight. Further requests are not sent, so that the load falls when other work takes the cores."""
LIMIT_S = 300.0
"""Time after which a request without an end counts as hung."""
ANSWER = (1, 24)
"""Fewest and most tokens of an answer."""
ABORTED, LEFT, CHATS, TEXTS, STREAMED = 0.08, 0.08, 0.35, 0.15, 0.6
"""Shares of requests: aborted by id, ended by a disconnect, chats, plain texts, streams."""


class Load:
    """Load through one router. ``ends`` counts how requests ended."""

    def __init__(self, port: int, seed: int, rate: float) -> None:
        self._port, self._seed, self._rate = port, seed, rate
        self._words = sorted({w for text in model.corpus() for w in text.split() if w.isalpha()})
        self._numbers = itertools.count(1)
        self.ends: Counter[str] = Counter()
        self.wrong: list[str] = []
        """First hundred requests that failed or hung, with the server's message."""

    @property
    def sent(self) -> int:
        """Return the number of requests that have ended."""
        return self.ends.total() - self.ends["not sent"]

    def jobs(self) -> Iterator[tuple[float, int, Job]]:
        """Yield jobs without end as (seconds since the start, number of the set of prompts, job)."""
        rng = random.Random(self._seed)
        offer = Offer(1.0, SEGMENT_S, self._rate, lambda tokens: tokens * LONE_S_PER_TOKEN)
        made = [named.make(name, SCALE) for name in WORKLOADS]
        for n in itertools.count():
            for job in made[n % len(made)].arrivals(offer, rng):
                yield n * SEGMENT_S + job.at_s, n // len(made) % SETS, job

    async def run(self, over: Callable[[], bool]) -> None:
        """Send each request when it is due, until ``over``; then wait for those in flight."""
        begin, rng = time.monotonic(), random.Random(self._seed + 1)
        running: set[asyncio.Task[None]] = set()
        for at_s, prompts, job in self.jobs():
            while not over() and (left := begin + at_s - time.monotonic()) > 0:
                await asyncio.sleep(min(left, 1.0))
            if over():
                break
            if len(running) >= MAX_IN_FLIGHT:
                self.ends["not sent"] += 1
                continue
            task = asyncio.ensure_future(self._one(job, prompts, random.Random(rng.random())))
            running.add(task)
            task.add_done_callback(running.discard)
        await asyncio.gather(*running)

    async def fill(self, tokens: int) -> None:
        """Fill the servers' caches with distinct prompts of ``tokens`` tokens in total."""
        rng = random.Random(self._seed + 2)
        for _ in range(0, tokens, 2 * SCALE.long):
            both = (self._ask(self._generate(Job(0.0, SCALE.long), rng), False) for _ in range(2))
            await asyncio.gather(*both)

    async def _one(self, job: Job, prompts: int, rng: random.Random) -> None:
        drawn = rng.random()
        if drawn < CHATS + TEXTS:
            route, body = self._text(job, prompts, rng, CHAT if drawn < CHATS else COMPLETIONS)
        else:
            route, body = GENERATE, self._generate(job, rng, prompts)[1]
        stream, what = rng.random() < STREAMED, rng.random()
        if what < ABORTED:
            await self._abort(route, body, stream, rng)
        else:
            leave_s = rng.random() if what < ABORTED + LEFT else None
            await self._ask((route, body), stream, leave_s)

    def _text(self, job: Job, prompts: int, rng: random.Random, route: str) -> tuple[str, dict[str, Any]]:
        """Return a request in words (about two tokens per word). Its conversation or shared prefix is the start of a
        fixed word sequence."""

        def words(r: random.Random, n: int) -> list[str]:
            return r.choices(self._words, k=max(1, n // 2))

        shared = words(random.Random(f"{self._seed} {prompts} {job.stream}"), SCALE.longest)
        if job.continues_stream:
            said = shared[: max(1, (job.cached + job.new) // 2)]
        else:
            said = [*shared[: job.cached // 2], *words(rng, job.new)]
        text, answer = " ".join(said), rng.randint(*ANSWER)
        body = {"model": "m", "max_tokens": answer, "temperature": 0, "ignore_eos": True}
        return route, body | ({"messages": [{"role": "user", "content": text}]} if route == CHAT else {"prompt": text})

    def _generate(self, job: Job, rng: random.Random, prompts: int = 0) -> tuple[str, dict[str, Any]]:
        """Return a request like that of ``_text``, in token ids."""

        def draw(r: random.Random, n: int) -> list[int]:
            return [r.randrange(*model.VOCABULARY) for _ in range(n)]

        history = draw(
            random.Random(f"ids {self._seed} {prompts} {job.stream}"), job.cached + job.new * job.continues_stream
        )
        ids = history if job.continues_stream else [*history, *draw(rng, job.new)]
        params = {"max_new_tokens": rng.randint(*ANSWER), "temperature": 0, "ignore_eos": True}
        return GENERATE, {"input_ids": ids, "sampling_params": params}

    async def _ask(
        self, request: tuple[str, dict[str, Any]], stream: bool, leave_s: float | None = None, rid: str | None = None
    ) -> None:
        route, body = request
        body = {**body, "stream": stream, **({"rid": rid} if rid else {})}
        record = RequestRecord(next(self._numbers), route, stream=stream, aborted=rid is not None)
        await run_with_limit(
            exchange(self._port, wire.request(route, json.dumps(body).encode()), record), record, leave_s, LIMIT_S
        )
        self._end(record)

    async def _abort(self, route: str, body: dict[str, Any], stream: bool, rng: random.Random) -> None:
        rid = f"soak-{rng.getrandbits(64):016x}"

        async def end_it() -> None:
            await asyncio.sleep(rng.random())
            abort_record = RequestRecord(0, "abort")
            raw = wire.request("/abort_request", json.dumps({"rid": rid}).encode())
            await run_with_limit(exchange(self._port, raw, abort_record), abort_record)
            self._end(abort_record)

        await asyncio.gather(self._ask((route, body), stream, rid=rid), end_it())

    def _end(self, record: RequestRecord) -> None:
        end = "answered"
        if record.left:
            end = "left"
        elif record.hung:
            end = "hung"
        elif not record.done:
            # An aborted request may end in any way.
            end = "aborted" if record.aborted else "failed"
        self.ends[end] += 1
        if end in ("hung", "failed") and len(self.wrong) < 100:
            why = f"no end after {LIMIT_S:.0f} s" if record.hung else f"{record.status} {record.reason} {record.broken}"
            self.wrong.append(f"{record.action} {record.number}: {why}")
