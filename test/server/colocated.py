"""Servers that prefill and decode and pause as often as possible, with requests and checks for them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
from dataclasses import dataclass, field, replace
from typing import Any

import http_load as load
import pytest
from rounds import repeat_until
from served import LAPS, NORMAL_LOOP, Prefill, Reference, Setup, random_prompt
from ties import TIE

from .slicing import SHAPE

COUNT_VARIABLE = "LAPS_COLOCATED_REQUESTS"
"""Environment variable: number of mixed requests. If set, also servers with two TP ranks and more loops are tested."""
COUNT = int(os.environ.get(COUNT_VARIABLE, "48"))
FREQUENT_PAUSES = (
    *("--chunked-prefill-size", "1024", "--max-total-tokens", "5600", "--schedule-conservativeness", "0.01"),
    *("--grammar-backend", "xgrammar"),  # on the host platform there is none by default
    *("--laps-config", json.dumps({"slice_ms": 0.01, "preempt_overhead": 1.0, "tbt_ms": 1.0})),
)
"""Arguments for a pause after each layer and as many decode steps in pauses as the prompts' share allows. Memory is
small and overcommitted to streams that may end early."""
LOOPS: dict[str, tuple[str, ...]] = {"overlap": (), **({"normal": NORMAL_LOOP} if COUNT_VARIABLE in os.environ else {})}
"""Flags by name of the event loop; both loops only if COUNT_VARIABLE is set."""
TWO_RANKS, TWO_CORES = ("--tp-size", "2"), {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
SETUPS = [
    Setup(f"colocated-{name}", (*LAPS, *FREQUENT_PAUSES, *flags), env, shape=shape, mode="null")
    for name, flags, env, shape in (
        ("normal", NORMAL_LOOP, {}, SHAPE),
        ("overlap", (), {}, SHAPE),
        *([("tp2", TWO_RANKS, TWO_CORES, replace(SHAPE, kv_heads=2))] if COUNT_VARIABLE in os.environ else []),
    )
]
FEATURES: tuple[dict[str, Any], ...] = (
    {"frequency_penalty": 0.6},
    {"presence_penalty": 0.8, "min_new_tokens": 10},
    {"repetition_penalty": 1.3, "ignore_eos": False, "min_new_tokens": 5},
)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "sizes": {"type": "array", "items": {"type": "integer"}},
    },
    "required": ["name", "sizes"],
}
GRAMMARS: tuple[dict[str, Any], ...] = (
    {"regex": "[0-9]{3}-[a-z]{4,20}"},
    {"json_schema": json.dumps(SCHEMA)},
    {"regex": "(yes|no), [a-z ]{5,60}", "frequency_penalty": 0.4},
)


@dataclass
class Request:
    """One request and its result."""

    rid: str
    prompt: list[int]
    new: int
    at_s: float
    leaves_after_s: float | None = None
    """Time after which the client disconnects, or aborts (seconds); None if the client stays."""
    aborts: bool = False
    logprobs: bool = False
    sampling: dict[str, Any] = field(default_factory=dict)
    adapter: str | None = None
    session: dict[str, Any] | None = None
    priority: int | None = None
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    probabilities: list[float] = field(default_factory=list)
    end: Any = None
    cached: Any = None
    """Cached prompt tokens, by kind of cache."""
    steps: int = 0
    """Number of draft verifications for the answer."""
    retractions: int = 0
    """Number of retractions of the stream."""

    def body(self) -> dict[str, Any]:
        """Return the body for ``/generate``."""
        sampling = {"max_new_tokens": self.new, "temperature": 0, "ignore_eos": True, **self.sampling}
        body = {"input_ids": self.prompt, "rid": self.rid, "stream": True, "sampling_params": sampling}
        body |= {} if self.adapter is None else {"lora_path": self.adapter}
        body |= {} if self.session is None else {"session_params": self.session}
        body |= {} if self.priority is None else {"priority": self.priority}
        return {**body, "return_logprob": self.logprobs}

    async def stream_answer(self, http: Any, url: str) -> None:
        """Stream the answer to its end."""
        async with http.post(url + "/generate", json=self.body()) as reply:
            assert reply.status == 200, await reply.text()
            async for line in reply.content:
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    assert "output_ids" in event or self.aborts, event
                    self.tokens, self.text = (
                        event.get("output_ids", self.tokens),
                        event.get("text", self.text),
                    )
                    self.end = event["meta_info"]["finish_reason"]
                    self.cached = event["meta_info"].get("cached_tokens_details")
                    self.steps = event["meta_info"].get("spec_verify_ct", 0)
                    self.retractions = event["meta_info"].get("num_retractions", 0)
                    self.probabilities = [p for p, *_ in event["meta_info"].get("output_token_logprobs", ())]

    async def send_at_its_time(self, http: Any, url: str) -> None:
        """Send the request at its time; disconnect or abort if the client leaves before the end."""
        await asyncio.sleep(self.at_s)
        if self.leaves_after_s is None:
            await self.stream_answer(http, url)
            return
        with contextlib.suppress(TimeoutError):
            if not self.aborts:
                await asyncio.wait_for(self.stream_answer(http, url), self.leaves_after_s)
                return
            asking = asyncio.ensure_future(self.stream_answer(http, url))
            await asyncio.wait({asking}, timeout=self.leaves_after_s)
            async with http.post(url + "/abort_request", json={"rid": self.rid}) as reply:
                assert reply.status == 200
            await asking


def mixed_requests(seed: int, count: int, name: str, spread_s: float) -> list[Request]:
    """Return streams, long prompts and short prompts, some with a common prefix."""
    rng, document = random.Random(seed), random_prompt(seed, 400)

    def one(i: int) -> Request:
        tokens, new = rng.choice(((rng.randint(20, 200), rng.randint(30, 60)), (rng.randint(10, 250), 6)))
        if i % 6 == 0:
            tokens, new = rng.randint(1100, 3500), 6
        prompt = random_prompt(10_000 * seed + i, tokens)
        return Request(f"{name}-{i}-x", document + prompt if i % 10 == 3 else prompt, new, rng.random() * spread_s)

    return [one(i) for i in range(count)]


def abort_some(requests: list[Request], rng: random.Random) -> None:
    """Let a third of the clients disconnect or abort."""
    for a in requests[::3]:
        a.leaves_after_s, a.aborts = rng.choice((0.02, 0.1, 0.4, 1.5)) * rng.random(), rng.random() < 0.5


def prompts_that_leave(name: str, seed: int, i: int) -> list[Request]:
    """Return prompts of one chunk, and of several, whose clients abort soon; in later rounds ``i`` later."""
    rng = random.Random(i)
    prompts = [random_prompt(seed + n, 950 if n % 2 else 2500) for n in range(24)]
    # On a slow machine prompts begin later.
    longest_s = 0.1 * 1.3**i
    return [
        Request(f"{name}-{n}-x", p, 4, 0.1 + 0.1 * n, leaves_after_s=longest_s * rng.random(), aborts=True)
        for n, p in enumerate(prompts)
    ]


def add_features(requests: list[Request], every: int = 1) -> list[Request]:
    """Give every ``every``-th request penalties, a grammar or log-probabilities, in turn, and return these requests."""
    found = requests[every - 1 :: every]
    for i, a in enumerate(found):
        kind, turn = i % 3, i // 3 % 3
        a.sampling, a.logprobs = (FEATURES[turn], GRAMMARS[turn], {})[kind], kind == 2
        a.new = 60 if kind == 1 else min(max(a.new, 12), 30)
    return found


def count_retractions(prefill: Prefill) -> int:
    """Return the number of retractions in the server's log."""
    return prefill.server.log.read_text(errors="replace").count("Retract requests")


async def send_all_at_their_times(prefill: Prefill, requests: list[Request]) -> None:
    async with load.session() as http:
        await asyncio.gather(*(a.send_at_its_time(http, prefill.server.url) for a in requests))


async def send_with_clients(prefill: Prefill, requests: list[Request], clients: int) -> None:
    free = asyncio.Semaphore(clients)

    async def one(http: Any, a: Request) -> None:
        async with free:
            await a.stream_answer(http, prefill.server.url)

    async with load.session() as http:
        await asyncio.gather(*(one(http, a) for a in requests))


def send_again(prefill: Prefill, requests: list[Request], name: str = "alone", clients: int = 1) -> list[Request]:
    """Send the same requests again, without disconnects, and return them. ``clients``: number of requests at a time,
    which must all fit into memory."""
    again = [
        replace(a, rid=f"{a.rid}-{name}", leaves_after_s=None, tokens=[], probabilities=[], end=None) for a in requests
    ]
    asyncio.run(send_with_clients(prefill, again, clients))
    return again


def require_equal_answers(requests: list[Request], expected: list[Request]) -> None:
    """Require that all received tokens equal the expected ones, and that clients that stayed received all tokens."""
    for a, b in zip(requests, expected, strict=True):
        if a.aborts and len(a.tokens) == 1 and a.sampling in GRAMMARS:
            continue  # aborted before its grammar was ready: SGLang ends such a request with a one-token pass
        description = f"{a.rid}, a prompt of {len(a.prompt)} tokens, {a.sampling} {a.end}"
        assert a.tokens == (b.tokens if a.leaves_after_s is None else b.tokens[: len(a.tokens)]), description
        assert a.probabilities == pytest.approx(b.probabilities[: len(a.probabilities)], abs=1e-3), description
        assert a.leaves_after_s is not None or (len(a.probabilities), a.end) == (len(b.probabilities), b.end), (
            description
        )


def require_right_answers(requests: list[Request], reference: Reference) -> None:
    """Require that all received tokens are right, and that clients that stayed received all tokens."""
    for a in requests:
        if a.leaves_after_s is None:
            assert len(a.tokens) == a.new or a.end["type"] == "stop", (a.rid, a.end)
        assert reference.shortfall(a.prompt, a.tokens) <= TIE, f"{a.rid}, a prompt of {len(a.prompt)} tokens"


def serve_until_pauses_are_used(prefill: Prefill, reference: Reference) -> None:
    """Serve mixed requests, a third of which leave or abort, until decode steps and short batches run in pauses."""
    before = prefill.get("/laps_status")

    def attempt(i: int) -> bool:
        requests = mixed_requests(500 + 100 * i, 40, f"{prefill.setup.name}-{i}", 2.0)
        abort_some(requests, random.Random(2))
        asyncio.run(send_all_at_their_times(prefill, requests))
        require_right_answers(requests, reference)
        prefill.require_all_tokens_free()
        after = prefill.get("/laps_status")
        assert after["enabled"], after["reason"]
        assert after["in_progress"] == 0
        steps = after["decode"]["steps_in_pauses"] - before["decode"]["steps_in_pauses"]
        return steps > 2 and after["preemption"]["by_short_batches"] > before["preemption"]["by_short_batches"]

    repeat_until(attempt, "steps and short batches run in pauses")


def serve_until_streams_are_retracted(prefill: Prefill, reference: Reference) -> None:
    """Serve more streams than fit into memory, plus long prompts, until a stream is retracted."""
    before = count_retractions(prefill)

    def attempt(i: int) -> bool:
        name, seed = f"retract-{i}-{prefill.setup.name}", 800 + 1000 * i
        requests = [Request(f"{name}-{i}-x", random_prompt(seed + i, 380), 160, 0.0) for i in range(13)]
        for a in requests:
            a.sampling = {"ignore_eos": False}
        requests += [Request(f"{name}-{i}-x", random_prompt(seed + i, 1500), 4, 0.5 + i - 13) for i in range(13, 16)]
        asyncio.run(send_all_at_their_times(prefill, requests))
        require_right_answers(requests, reference)
        prefill.require_all_tokens_free()
        return count_retractions(prefill) > before

    repeat_until(attempt, "a stream is retracted")
