"""Servers that prefill and decode, under load: decode steps and short batches in the pauses of long prompts, and every
token as it is alone."""

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
from served import LAPS, NORMAL_LOOP, Prefill, Reference, Setup, ids, on

from .slicing import SHAPE

MANY = "LAPS_COLOCATED_REQUESTS"
"""How many mixed requests; then two tensor-parallel ranks serve them, too."""
COUNT = int(os.environ.get(MANY, "48"))
EVERY_PAUSE = (
    *("--chunked-prefill-size", "1024", "--max-total-tokens", "5600", "--schedule-conservativeness", "0.01"),
    *("--laps-config", json.dumps({"slice_ms": 0.01, "preempt_overhead": 1.0, "tbt_ms": 1.0})),
)
"""A pause after each layer, and a step in as many of them as prompts' share allows; little memory, which is promised to
more streams than it holds, where they may end early."""
TWO_RANKS, TWO_CORES = ("--tp-size", "2"), {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
SETUPS = [
    Setup(f"colocated-{name}", (*LAPS, *EVERY_PAUSE, *flags), env, shape=shape, mode="null")
    for name, flags, env, shape in (
        ("normal", NORMAL_LOOP, {}, SHAPE),
        ("overlap", (), {}, SHAPE),
        *([("tp2", TWO_RANKS, TWO_CORES, replace(SHAPE, kv_heads=2))] if MANY in os.environ else []),
    )
]
pytestmark = [pytest.mark.timeout(600 + 3 * COUNT), *on(*SETUPS)]
FEATURES: tuple[dict[str, Any], ...] = (
    {"frequency_penalty": 0.6},
    {"presence_penalty": 0.8, "min_new_tokens": 10},
    {"repetition_penalty": 1.3, "ignore_eos": False, "min_new_tokens": 5},
)


@dataclass
class Asked:
    """One request, and what became of it."""

    rid: str
    prompt: list[int]
    new: int
    at_s: float
    leaves_s: float | None = None
    """The client leaves, or aborts, after so long."""
    aborts: bool = False
    logprobs: bool = False
    sampling: dict[str, Any] = field(default_factory=dict)
    tokens: list[int] = field(default_factory=list)
    probabilities: list[float] = field(default_factory=list)
    end: Any = None

    async def ask(self, http: Any, url: str) -> None:
        """Stream the answer to its end."""
        sampling = {"max_new_tokens": self.new, "temperature": 0, "ignore_eos": True, **self.sampling}
        body = {"input_ids": self.prompt, "rid": self.rid, "stream": True, "sampling_params": sampling}
        async with http.post(url + "/generate", json={**body, "return_logprob": self.logprobs}) as reply:
            assert reply.status == 200, await reply.text()
            async for line in reply.content:
                if line.startswith(b"data: {"):
                    said = json.loads(line[6:])
                    assert "output_ids" in said or self.aborts, said
                    self.tokens = said.get("output_ids", self.tokens)
                    self.end = said["meta_info"]["finish_reason"]
                    self.probabilities = [p for p, *_ in said["meta_info"].get("output_token_logprobs", ())]

    async def come(self, http: Any, url: str) -> None:
        """The same when its time has come, and no longer than its client stays."""
        await asyncio.sleep(self.at_s)
        if self.leaves_s is None:
            await self.ask(http, url)
            return
        with contextlib.suppress(TimeoutError):
            if not self.aborts:
                await asyncio.wait_for(self.ask(http, url), self.leaves_s)
                return
            asking = asyncio.ensure_future(self.ask(http, url))
            await asyncio.wait({asking}, timeout=self.leaves_s)
            async with http.post(url + "/abort_request", json={"rid": self.rid}) as reply:
                assert reply.status == 200
            await asking


def mixed(seed: int, count: int, name: str, spread_s: float) -> list[Asked]:
    """Streams, long prompts and short ones, with some begins in common."""
    rng, document = random.Random(seed), ids(seed, 400)

    def one(i: int) -> Asked:
        tokens, new = rng.choice(((rng.randint(20, 200), rng.randint(30, 60)), (rng.randint(10, 250), 6)))
        if i % 6 == 0:
            tokens, new = rng.randint(1100, 3500), 6
        prompt = ids(10_000 * seed + i, tokens)
        return Asked(f"{name}-{i}-x", document + prompt if i % 10 == 3 else prompt, new, rng.random() * spread_s)

    return [one(i) for i in range(count)]


async def at_once(prefill: Prefill, asked: list[Asked]) -> None:
    async with load.session() as http:
        await asyncio.gather(*(a.come(http, prefill.server.url) for a in asked))


async def one_by_one(prefill: Prefill, asked: list[Asked]) -> None:
    async with load.session() as http:
        for a in asked:
            await a.ask(http, prefill.server.url)


def must_be_right(asked: list[Asked], reference: Reference) -> None:
    """All that came is as it should be, and all of it came to those who stayed."""
    for a in asked:
        if a.leaves_s is None:
            assert len(a.tokens) == a.new or a.end["type"] == "stop", (a.rid, a.end)
        assert a.tokens == reference.after_each(a.prompt, a.tokens), f"{a.rid}, a prompt of {len(a.prompt)} tokens"


def test_every_token_is_right_whatever_runs_in_the_pauses(prefill: Prefill, reference: Reference) -> None:
    """A third of the clients leave or abort."""
    asked = mixed(1, COUNT, prefill.setup.name, COUNT / 12)
    rng = random.Random(2)
    for a in asked[::3]:
        a.leaves_s, a.aborts = rng.choice((0.02, 0.1, 0.4, 1.5)) * rng.random(), rng.random() < 0.5
    before = prefill.get("/laps_status")
    asyncio.run(at_once(prefill, asked))
    after = prefill.get("/laps_status")
    assert after["enabled"], after["reason"]
    # Two ranks agree on each step, and come to fewer.
    least = COUNT // 20 if TWO_RANKS[0] in prefill.setup.args else COUNT // 3
    assert after["decode"]["steps_in_pauses"] > before["decode"]["steps_in_pauses"] + least
    assert after["preemption"]["by_short_batches"] > before["preemption"]["by_short_batches"]
    must_be_right(asked, reference)
    prefill.all_tokens_are_free()
    assert prefill.get("/laps_status")["in_progress"] == 0


def test_streams_are_retracted_where_memory_runs_out(prefill: Prefill, reference: Reference) -> None:
    """In pauses, too: long prompts hold the memory that streams lack."""
    name, log = f"retract-{prefill.setup.name}", prefill.server.log
    before = log.read_text(errors="replace").count("Retract requests")
    asked = [Asked(f"{name}-{i}-x", ids(800 + i, 380), 80, 0.02 * i) for i in range(13)]
    for a in asked:
        a.sampling = {"ignore_eos": False}
    asked += [Asked(f"{name}-{i}-x", ids(800 + i, 1500), 4, 0.5 + i - 13) for i in range(13, 16)]
    asyncio.run(at_once(prefill, asked))
    assert log.read_text(errors="replace").count("Retract requests") > before
    must_be_right(asked, reference)
    prefill.all_tokens_are_free()


def test_penalties_and_log_probabilities_are_those_of_the_request_alone(prefill: Prefill) -> None:
    asked = mixed(3, 16, f"features-{prefill.setup.name}", 1.0)
    for i, a in enumerate(asked):
        a.sampling, a.logprobs = (FEATURES[i % 4], False) if i % 4 < 3 else ({}, True)
        a.new = min(max(a.new, 12), 30)
    asyncio.run(one_by_one(prefill, asked))
    alone = [(a.tokens, a.probabilities) for a in asked]
    prefill.all_tokens_are_free()
    for a in asked:
        a.rid += "-again"  # SGLang aborts the id of a stream some seconds after its end
    asyncio.run(at_once(prefill, asked))
    for a, (tokens, probabilities) in zip(asked, alone, strict=True):
        assert a.tokens == tokens, f"{a.rid} {a.sampling} {a.end}"
        assert a.probabilities == pytest.approx(probabilities, abs=1e-3)
    prefill.all_tokens_are_free()


def test_a_pause_of_the_server_retracts_what_is_parked_too(prefill: Prefill, reference: Reference) -> None:
    asked = mixed(5, 12, f"pause-{prefill.setup.name}", 0.5)

    async def scenario() -> None:
        running = asyncio.ensure_future(at_once(prefill, asked))
        await asyncio.sleep(1.0)
        async with load.session() as http:
            async with http.post(prefill.server.url + "/pause_generation", json={"mode": "retract"}) as reply:
                assert reply.status == 200
            async with http.post(prefill.server.url + "/continue_generation", json={}) as reply:
                assert reply.status == 200
        await running

    asyncio.run(scenario())
    must_be_right(asked, reference)
    prefill.all_tokens_are_free()
