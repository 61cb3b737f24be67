"""Actions of clients: ask, disconnect, send half, abort, reuse an id, batch, pipeline, send rubbish, stop reading."""

from __future__ import annotations

import asyncio
import functools
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from benchmark.rig.servers import bearer
from faults import corpus, wire
from faults.clients import HUNG_S, BareClient, OpenAiClient, exchange, read_answer, run_with_limit
from faults.evidence import MARKER
from faults.fleet import KEY, LIMIT_S
from faults.oracle import Oracle, RequestRecord
from faults.prompts import COMPLETIONS, GENERATE, Prompt
from faults.schedule import DECODE, Action

CLIENTS = 24
"""Clients of all routers together."""
THINK_S = 1.0
"""Longest pause of a client between two actions (seconds); pauses leave cores to restarting servers."""
REFUSABLE = frozenset((400,))
HALF_S = (0.1, 3.0)
PAUSE_S = (1.0, 4.0)
"""Shortest and longest pause of a client that reads on (seconds)."""
UNREAD_S = LIMIT_S + 15.0
"""Pause of a client that does not read, before it checks that its request was ended (seconds). Longer than the router's
limit, which can start when all buffers are full."""
MAX_UNREAD = 2
"""Most unread requests at a time, for each router."""
STALL_TOKENS = 400
"""Tokens of an unread answer: a megabyte, as each event of /generate repeats all tokens; buffers keep a quarter."""
PIPELINE_TOKENS = 2000
"""Tokens of an answer that is still running when the router notices the client's disconnect."""
DISCONNECT_LIMIT_S = 5.0
PIPELINED_COUNTS = (1, 2, 200)
"""Numbers of further requests on a connection whose first answer is not complete."""
OVERLAP_S = 0.15
"""Largest delay between two requests of one id at which each can find the other's id at a server (seconds)."""


class Clients:
    """All clients of one router. Every request is reported to the oracle once."""

    def __init__(
        self, ports: Sequence[int], prompts: Sequence[Prompt], answers: Sequence[Any], oracle: Oracle,
        numbers: Iterator[int],
    ) -> None:  # fmt: skip
        """``ports``: ports of the routers; requests go to the first, aborts to the last. ``numbers``: request numbers,
        shared by all crowds."""
        port = self._port = ports[0]
        self._abort_port, self._share = ports[-1], CLIENTS // len(ports)
        self._prompts, self._answers, self.oracle = prompts, answers, oracle
        self._bare, self._openai = BareClient(port), OpenAiClient(port)
        self._numbers = numbers
        self._unread: set[asyncio.Task[None]] = set()
        self._generating = [i for i, p in enumerate(prompts) if p.route == GENERATE and "input_ids" in p.body]
        # A reply to HEAD has no body, thus no reason of a refusal.
        self._hostile_cases = [c for c in corpus.CASES if c.quick and not c.raw.startswith(b"HEAD")]

    async def run(self, work: Iterator[Action], over: Callable[[], bool]) -> None:
        """Run this router's clients until ``over``. Each client runs one action after the other."""

        async def client() -> None:
            while not over():
                action = next(work)
                await self.do(action)
                await asyncio.sleep(random.Random(action.seed).random() * THINK_S)

        try:
            await asyncio.gather(*(client() for _ in range(self._share)))
        finally:
            await self._openai.close()

    async def finish(self) -> None:
        """Wait for the unread requests."""
        await asyncio.gather(*self._unread)

    async def do(self, action: Action) -> None:
        """Carry out one action until all its requests have ended."""
        i = action.prompt % len(self._prompts)
        for record in await getattr(self, f"_{action.kind}")(action, i, random.Random(action.seed)):
            self.oracle.judge_and_count(record)

    def _new_record(self, action: str, want: Any = None, **more: Any) -> RequestRecord:
        return RequestRecord(next(self._numbers), action, want, **more)

    async def _ask(
        self, action: Action, i: int, extra: Mapping[str, Any] | None = None, leave_s: float | None = None, **more: Any
    ) -> RequestRecord:
        prompt = self._prompts[i]
        record = self._new_record(action.kind, self._answers[i], stream=action.stream, **more)
        client = self._openai if action.openai and prompt.route != GENERATE else self._bare
        return await run_with_limit(client(prompt, record, extra or {}), record, leave_s)

    async def _send(
        self, record: RequestRecord, path: str, body: Mapping[str, Any], share: float = 1.0, port: int = 0,
        key: str | None = None, **more: Any,
    ) -> RequestRecord:  # fmt: skip
        """Send the first ``share`` of a request; any answer is accepted."""
        raw = wire.request(path, json.dumps(body).encode(), {MARKER: str(record.number), **bearer(key)})
        return await run_with_limit(
            exchange(port or self._port, raw[: max(1, int(share * len(raw)))], record), record, **more
        )

    async def _plain(self, action: Action, i: int, rng: random.Random) -> list[RequestRecord]:
        """Send a request; one in five brings its own id."""
        return [await self._ask(action, i, {"rid": _new_rid(action, rng)} if rng.random() < 0.2 else {})]

    async def _leave(self, action: Action, i: int, rng: random.Random) -> list[RequestRecord]:
        return [await self._ask(action, i, leave_s=_random_delay_s(rng))]

    async def _half(self, action: Action, i: int, rng: random.Random) -> list[RequestRecord]:
        """Send part of a body, pause, and disconnect. A server may refuse the request before that."""
        prompt, record = self._prompts[i], self._new_record(action.kind, may_refuse=frozenset((400, 408)))
        return [await self._send(record, prompt.route, prompt.body, rng.random(), leave_s=rng.uniform(*HALF_S))]

    async def _abort(self, action: Action, i: int, rng: random.Random) -> list[RequestRecord]:
        """Send a request with a new id and abort it at a random moment."""
        rid = _new_rid(action, rng)

        async def end_it() -> RequestRecord:
            await asyncio.sleep(_random_delay_s(rng))
            abort_record = self._new_record("abort route")
            return await self._send(abort_record, "/abort_request", {"rid": rid}, port=self._abort_port, key=KEY)

        return list(await asyncio.gather(self._ask(action, i, {"rid": rid}, aborted=True), end_it()))

    async def _twin(self, action: Action, i: int, rng: random.Random) -> list[RequestRecord]:
        """Send two requests under one id: the first is served as if it were alone, the second served or refused."""
        rid = _new_rid(action, rng)
        later_s = rng.choice((0.0, 0.05, 0.3)) * rng.random()

        async def ask(after_s: float) -> RequestRecord:
            await asyncio.sleep(after_s)
            return await self._ask(action, i, {"rid": rid}, may_refuse=REFUSABLE)

        first, other = await asyncio.gather(ask(0.0), ask(later_s))
        if first.status == other.status == 400 and later_s > OVERLAP_S:
            # The first request had the id alone, so a refusal of it is wrong.
            first.may_refuse = frozenset()
        return [first, other]

    async def _batch(self, action: Action, _: int, rng: random.Random) -> list[RequestRecord]:
        """Send several prompts in one request to /generate."""
        some = rng.sample(self._generating, min(len(self._generating), rng.randint(2, 4)))
        body = {name: [self._prompts[i].body[name] for i in some] for name in ("input_ids", "sampling_params")}
        record = self._new_record(action.kind, [self._answers[i] for i in some])
        return [await run_with_limit(self._bare(Prompt(GENERATE, body), record, {}), record)]

    async def _stall(self, action: Action, _: int, rng: random.Random) -> list[RequestRecord]:
        """Pause while reading a stream; in some cases past the router's limit, so that the request loses its slots."""
        i = rng.choice(self._generating)
        params = {**self._prompts[i].body["sampling_params"], "max_new_tokens": STALL_TOKENS}
        record = self._new_record(action.kind, stream=True)
        raw = self._raw(record, GENERATE, {**self._prompts[i].body, "sampling_params": params})

        async def ask(pause_s: float, limit_s: float) -> RequestRecord:
            call = exchange(self._port, raw, record, functools.partial(read_answer, GENERATE), pause_s)
            await run_with_limit(call, record, limit_s=limit_s)
            # The known answer is the start of this longer answer.
            known = self._answers[i]
            rest = (record.answer or [])[len(known) :]
            record.expected = [*known, *rest, *([None] * (STALL_TOKENS - len(known) - len(rest)))]
            return record

        async def unread() -> None:
            self.oracle.judge_and_count(await ask(UNREAD_S, UNREAD_S + HUNG_S))

        # Unread requests first, so that a short campaign need not wait for them at its end.
        if len(self._unread) >= MAX_UNREAD:
            return [await ask(rng.uniform(*PAUSE_S), HUNG_S)]
        record.limit_s, record.may_cut = LIMIT_S, "nobody read its stream"
        task = asyncio.ensure_future(unread())
        self._unread.add(task)
        task.add_done_callback(self._unread.discard)
        return []

    async def _pipeline(self, action: Action, i: int, rng: random.Random) -> list[RequestRecord]:
        """Send a request and further requests behind it on one connection. The client reads the first answer, or
        disconnects, which the router must notice despite the further requests."""
        behind = wire.request("/liveness", b"", method="GET") * rng.choice(PIPELINED_COUNTS)
        if rng.random() < 0.5:
            prompt, record = self._prompts[i], self._new_record(action.kind, self._answers[i], stream=action.stream)
            # A server may refuse pipelined requests.
            record.may_cut, record.may_refuse = "pipelined", frozenset(range(400, 500))
            raw = self._raw(record, prompt.route, prompt.body) + behind
            return [
                await run_with_limit(
                    exchange(self._port, raw, record, functools.partial(read_answer, prompt.route)), record
                )
            ]
        rid, record = _new_rid(action, rng), self._new_record(action.kind, stream=True)
        body = {"model": "m", "prompt": f"{rid} tell me more", "max_tokens": PIPELINE_TOKENS, "temperature": 0}
        raw = self._raw(record, COMPLETIONS, {**body, "ignore_eos": True, "rid": rid}) + behind
        record.may_cut, record.may_refuse = "pipelined", frozenset(range(400, 500))
        await run_with_limit(exchange(self._port, raw, record), record, leave_s=rng.uniform(0.5, 1.5))
        return [record, await self._wait_until_id_is_free(action, rid)]

    async def _wait_until_id_is_free(self, action: Action, rid: str) -> RequestRecord:
        """Repeat a request with the id of a disconnected client until the id is accepted, that is, until the client's
        request has ended."""
        loop, body = asyncio.get_running_loop(), {"model": "m", "prompt": "Still there?", "max_tokens": 1, "rid": rid}
        begin = since = loop.time()
        while True:
            record = await self._send(self._new_record(action.kind), COMPLETIONS, {**body, "temperature": 0})
            now = loop.time()
            if self.oracle.had_fault(DECODE, since, now):
                since = now  # a suspended server cannot notice a disconnect
            if record.status != 400 or now > min(since + DISCONNECT_LIMIT_S, begin + LIMIT_S):
                return record
            await asyncio.sleep(0.2)

    async def _keyless(self, action: Action, i: int, rng: random.Random) -> list[RequestRecord]:
        """Try to abort requests without the key: by id, by prefix, or all. Or disconnect a request whose id can be a
        prefix of other ids. No other request must be affected."""
        if rng.random() < 0.3:
            rid = f"{rng.randrange(16):x}"
            return [await self._ask(action, i, {"rid": rid}, leave_s=_random_delay_s(rng), may_refuse=REFUSABLE)]
        rid = _new_rid(action, rng)
        bodies: list[dict[str, Any]] = [{"rid": rid}, {"rid": rid[: rng.randint(1, len(rid) - 1)]}, {"abort_all": True}]

        async def stranger() -> RequestRecord:
            await asyncio.sleep(_random_delay_s(rng))
            abort_record = self._new_record("keyless abort", may_refuse=frozenset((401, 403)))
            return await self._send(abort_record, "/abort_request", rng.choice(bodies))

        return list(await asyncio.gather(self._ask(action, i, {"rid": rid}), stranger(), stranger()))

    def _raw(self, record: RequestRecord, route: str, body: Mapping[str, Any]) -> bytes:
        return wire.request(route, json.dumps({**body, "stream": record.stream}).encode(), {MARKER: str(record.number)})

    async def _hostile(self, action: Action, _: int, rng: random.Random) -> list[RequestRecord]:
        """Send a case of the corpus. The case only has to end; ``comparison`` judges the answers of all cases."""
        case = rng.choice(self._hostile_cases)
        record = self._new_record(action.kind, stream=case.stream, may_refuse=frozenset(range(400, 500)))
        return [await run_with_limit(exchange(self._port, case.wire({MARKER: str(record.number)}), record), record)]


def _new_rid(action: Action, rng: random.Random) -> str:
    """Return an id that is no prefix of another id, because SGLang aborts by prefix."""
    return f"{action.seed:08x}-{rng.getrandbits(64):016x}"


def _random_delay_s(rng: random.Random) -> float:
    """Return a random delay (seconds), after which a request waits, is being prefilled or streams."""
    return rng.choice((0.02, 0.2, 0.8)) * rng.random()
