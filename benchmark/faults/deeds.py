"""What clients do: ask, leave, send half, abort, ask twice under one id, ask many things at once, send rubbish."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmark.faults import corpus, wire
from benchmark.faults.clients import Bare, OpenAi, bounded
from benchmark.faults.evidence import MARKER
from benchmark.faults.oracle import Oracle, Seen
from benchmark.faults.prompts import GENERATE, Prompt
from benchmark.faults.schedule import Deed

REFUSABLE = frozenset((400,))
HALF_S = (0.1, 3.0)
TOGETHER_S = 0.15
"""Two requests this close may each find the other's id at one of their two servers."""


class Crowd:
    """All clients of one router. Every request it makes is reported to the oracle once."""

    def __init__(self, port: int, prompts: Sequence[Prompt], answers: Sequence[Any], oracle: Oracle) -> None:
        self._port = port
        self._prompts, self._answers, self._oracle = prompts, answers, oracle
        self._bare, self._openai = Bare(port), OpenAi(port)
        self._numbers = itertools.count(1)
        self._generating = [i for i, p in enumerate(prompts) if p.route == GENERATE and "input_ids" in p.body]
        self._rubbish = [c for c in corpus.CASES if c.quick]

    async def close(self) -> None:
        """Close kept connections."""
        await self._openai.close()

    async def do(self, deed: Deed) -> None:
        """One deed, to its end."""
        rng = random.Random(deed.seed)
        i = deed.prompt % len(self._prompts)
        await getattr(self, f"_{deed.kind}")(deed, i, rng)

    async def _ask(
        self, deed: Deed, i: int, extra: Mapping[str, Any] | None = None, leave_s: float | None = None, **more: Any
    ) -> Seen:
        prompt = self._prompts[i]
        seen = Seen(next(self._numbers), deed.kind, self._answers[i], stream=deed.stream, **more)
        client = self._openai if deed.openai and prompt.route != GENERATE else self._bare
        await bounded(client(prompt, seen, extra or {}), seen, time.monotonic, leave_s)
        return seen

    async def _plain(self, deed: Deed, i: int, rng: random.Random) -> None:
        """One in five under an id of its own."""
        extra = {"rid": _rid(deed, rng)} if rng.random() < 0.2 else {}
        self._oracle.ended(await self._ask(deed, i, extra))

    async def _leave(self, deed: Deed, i: int, rng: random.Random) -> None:
        self._oracle.ended(await self._ask(deed, i, leave_s=rng.choice((0.02, 0.2, 0.8)) * rng.random()))

    async def _half(self, deed: Deed, i: int, rng: random.Random) -> None:
        """Part of a body, a pause, and away; a server that has enough of it may say so first."""
        prompt = self._prompts[i]
        seen = Seen(next(self._numbers), deed.kind, may_refuse=frozenset((400, 408)))
        raw = wire.request(prompt.route, json.dumps(prompt.body).encode(), {MARKER: str(seen.number)})
        keep = rng.randrange(1, len(raw))

        async def send() -> None:
            try:
                with await wire.Connection.to(self._port) as connection:
                    await connection.send(raw[:keep])
                    reply = await connection.reply()
                    seen.reason, seen.status = wire.reason(await reply.body()), reply.status
            except (wire.Broken, OSError) as e:
                seen.broken = str(e)

        await bounded(send(), seen, time.monotonic, rng.uniform(*HALF_S))
        self._oracle.ended(seen)

    async def _abort(self, deed: Deed, i: int, rng: random.Random) -> None:
        """Ask under an id of its own, and have it aborted at a random moment."""
        rid = _rid(deed, rng)

        async def end_it() -> None:
            await asyncio.sleep(rng.choice((0.02, 0.2, 0.8)) * rng.random())
            seen = Seen(next(self._numbers), "abort route")
            await bounded(self._post("/abort_request", {"rid": rid}, seen), seen, time.monotonic)
            self._oracle.ended(seen)

        asked, _ = await asyncio.gather(self._ask(deed, i, {"rid": rid}, aborted=True), end_it())
        self._oracle.ended(asked)

    async def _post(self, path: str, body: dict[str, Any], seen: Seen) -> None:
        try:
            with await wire.Connection.to(self._port) as connection:
                await connection.send(wire.request(path, json.dumps(body).encode(), {MARKER: str(seen.number)}))
                reply = await connection.reply()
                seen.reason, seen.status, seen.done = wire.reason(await reply.body()), reply.status, True
        except (wire.Broken, OSError) as e:
            seen.broken = str(e)

    async def _twin(self, deed: Deed, i: int, rng: random.Random) -> None:
        """Two requests under one id: the first is served as if it were alone, the second too or refused."""
        rid = _rid(deed, rng)

        later_s = rng.choice((0.0, 0.05, 0.3)) * rng.random()

        async def second() -> Seen:
            await asyncio.sleep(later_s)
            return await self._ask(deed, i, {"rid": rid}, may_refuse=REFUSABLE)

        first, other = await asyncio.gather(self._ask(deed, i, {"rid": rid}, may_refuse=REFUSABLE), second())
        if first.status == other.status == 400 and later_s > TOGETHER_S:
            # One of them had the id.
            first.may_refuse = frozenset()
        for seen in (first, other):
            self._oracle.ended(seen)

    async def _batch(self, deed: Deed, _: int, rng: random.Random) -> None:
        """Several prompts in one request to /generate."""
        some = rng.sample(self._generating, min(len(self._generating), rng.randint(2, 4)))
        body = {
            "input_ids": [self._prompts[i].body["input_ids"] for i in some],
            "sampling_params": [self._prompts[i].body["sampling_params"] for i in some],
        }
        seen = Seen(next(self._numbers), deed.kind, [self._answers[i] for i in some])
        await bounded(self._bare(Prompt(GENERATE, body, "short"), seen, {}), seen, time.monotonic)
        self._oracle.ended(seen)

    async def _hostile(self, deed: Deed, _: int, rng: random.Random) -> None:
        """A case of the corpus; what it should be answered is settled elsewhere, here it must have an end."""
        case = rng.choice(self._rubbish)
        seen = Seen(next(self._numbers), deed.kind, stream=case.stream, may_refuse=frozenset(range(400, 500)))

        async def send() -> None:
            outcome = await corpus.send(self._port, case, {MARKER: str(seen.number)})
            seen.status, seen.reason, seen.broken = outcome.status, outcome.reason, outcome.broken
            seen.done = outcome.status is not None and not outcome.broken and not outcome.soft

        await bounded(send(), seen, time.monotonic)
        self._oracle.ended(seen)


def _rid(deed: Deed, rng: random.Random) -> str:
    """An id that no other is the beginning of: SGLang aborts by beginnings."""
    return f"{deed.seed:08x}-{rng.getrandbits(64):016x}"
