"""What clients do: ask, leave, send half, abort, ask twice under one id, ask many things at once, send rubbish."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from benchmark.faults import corpus, wire
from benchmark.faults.clients import Bare, OpenAi, bounded, exchange
from benchmark.faults.evidence import MARKER
from benchmark.faults.oracle import Oracle, Seen
from benchmark.faults.prompts import GENERATE, Prompt
from benchmark.faults.schedule import Deed

CLIENTS = 24
"""Of all routers together."""
THINK_S = 1.0
"""Longest pause of a client between two deeds: servers that start again need some of the cores too."""
REFUSABLE = frozenset((400,))
HALF_S = (0.1, 3.0)
TOGETHER_S = 0.15
"""Two requests this close may each find the other's id at one of their two servers."""


class Crowd:
    """All clients of one router. Every request it makes is reported to the oracle once."""

    def __init__(
        self, ports: Sequence[int], prompts: Sequence[Prompt], answers: Sequence[Any], oracle: Oracle,
        numbers: Iterator[int],
    ) -> None:  # fmt: skip
        """``ports`` of the routers: what clients ask is sent to the first, what they abort to the last. ``numbers``: of
        the requests of all crowds."""
        port = self._port = ports[0]
        self._abort_port, self._share = ports[-1], CLIENTS // len(ports)
        self._prompts, self._answers, self.oracle = prompts, answers, oracle
        self._bare, self._openai = Bare(port), OpenAi(port)
        self._numbers = numbers
        self._generating = [i for i, p in enumerate(prompts) if p.route == GENERATE and "input_ids" in p.body]
        # The answer to a HEAD has no body to give a reason in.
        self._rubbish = [c for c in corpus.CASES if c.quick and not c.raw.startswith(b"HEAD")]

    async def run(self, work: Iterator[Deed], over: Callable[[], bool]) -> None:
        """So many clients, each busy with one deed after the other until it is ``over``."""

        async def client() -> None:
            while not over():
                deed = next(work)
                await self.do(deed)
                await asyncio.sleep(random.Random(deed.seed).random() * THINK_S)

        try:
            await asyncio.gather(*(client() for _ in range(self._share)))
        finally:
            await self._openai.close()

    async def do(self, deed: Deed) -> None:
        """One deed, to the end of all its requests."""
        i = deed.prompt % len(self._prompts)
        for seen in await getattr(self, f"_{deed.kind}")(deed, i, random.Random(deed.seed)):
            self.oracle.ended(seen)

    def _new(self, deed: str, want: Any = None, **more: Any) -> Seen:
        return Seen(next(self._numbers), deed, want, **more)

    async def _ask(
        self, deed: Deed, i: int, extra: Mapping[str, Any] | None = None, leave_s: float | None = None, **more: Any
    ) -> Seen:
        prompt = self._prompts[i]
        seen = self._new(deed.kind, self._answers[i], stream=deed.stream, **more)
        client = self._openai if deed.openai and prompt.route != GENERATE else self._bare
        return await bounded(client(prompt, seen, extra or {}), seen, leave_s)

    async def _send(
        self, seen: Seen, path: str, body: Mapping[str, Any], share: float = 1.0, port: int = 0, **more: Any
    ) -> Seen:
        """The ``share`` of a request that needs no answer of its own."""
        raw = wire.request(path, json.dumps(body).encode(), {MARKER: str(seen.number)})
        return await bounded(exchange(port or self._port, raw[: max(1, int(share * len(raw)))], seen), seen, **more)

    async def _plain(self, deed: Deed, i: int, rng: random.Random) -> list[Seen]:
        """One in five under an id of its own."""
        return [await self._ask(deed, i, {"rid": _rid(deed, rng)} if rng.random() < 0.2 else {})]

    async def _leave(self, deed: Deed, i: int, rng: random.Random) -> list[Seen]:
        return [await self._ask(deed, i, leave_s=_soon(rng))]

    async def _half(self, deed: Deed, i: int, rng: random.Random) -> list[Seen]:
        """Part of a body, a pause, and away; a server that has enough of it may say so first."""
        prompt, seen = self._prompts[i], self._new(deed.kind, may_refuse=frozenset((400, 408)))
        return [await self._send(seen, prompt.route, prompt.body, rng.random(), leave_s=rng.uniform(*HALF_S))]

    async def _abort(self, deed: Deed, i: int, rng: random.Random) -> list[Seen]:
        """Ask under an id of its own, and have it aborted at a random moment."""
        rid = _rid(deed, rng)

        async def end_it() -> Seen:
            await asyncio.sleep(_soon(rng))
            return await self._send(self._new("abort route"), "/abort_request", {"rid": rid}, port=self._abort_port)

        return list(await asyncio.gather(self._ask(deed, i, {"rid": rid}, aborted=True), end_it()))

    async def _twin(self, deed: Deed, i: int, rng: random.Random) -> list[Seen]:
        """Two requests under one id: the first is served as if it were alone, the second too or refused."""
        rid = _rid(deed, rng)
        later_s = rng.choice((0.0, 0.05, 0.3)) * rng.random()

        async def ask(after_s: float) -> Seen:
            await asyncio.sleep(after_s)
            return await self._ask(deed, i, {"rid": rid}, may_refuse=REFUSABLE)

        first, other = await asyncio.gather(ask(0.0), ask(later_s))
        if first.status == other.status == 400 and later_s > TOGETHER_S:
            # One of them had the id.
            first.may_refuse = frozenset()
        return [first, other]

    async def _batch(self, deed: Deed, _: int, rng: random.Random) -> list[Seen]:
        """Several prompts in one request to /generate."""
        some = rng.sample(self._generating, min(len(self._generating), rng.randint(2, 4)))
        body = {name: [self._prompts[i].body[name] for i in some] for name in ("input_ids", "sampling_params")}
        seen = self._new(deed.kind, [self._answers[i] for i in some])
        return [await bounded(self._bare(Prompt(GENERATE, body), seen, {}), seen)]

    async def _hostile(self, deed: Deed, _: int, rng: random.Random) -> list[Seen]:
        """A case of the corpus; what it should be answered is settled elsewhere, here it must have an end."""
        case = rng.choice(self._rubbish)
        seen = self._new(deed.kind, stream=case.stream, may_refuse=frozenset(range(400, 500)))
        return [await bounded(exchange(self._port, case.wire({MARKER: str(seen.number)}), seen), seen)]


def _rid(deed: Deed, rng: random.Random) -> str:
    """An id that no other is the beginning of: SGLang aborts by beginnings."""
    return f"{deed.seed:08x}-{rng.getrandbits(64):016x}"


def _soon(rng: random.Random) -> float:
    """A moment while a request waits, is prefilled or streams (seconds)."""
    return rng.choice((0.02, 0.2, 0.8)) * rng.random()
