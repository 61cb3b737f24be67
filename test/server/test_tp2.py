"""Two tensor-parallel ranks: every rank takes the same decisions, window and clock included."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from .conftest import CHUNK, LAPS, Prefill, Reference
from .test_prefill_server import ids, send_all

pytestmark = [pytest.mark.usefixtures("clean")]


@pytest.fixture(scope="module")
def prefill(start_prefill: Callable[..., Any]) -> Iterator[Prefill]:
    env = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    knobs = '{"long_share": 0.4}'
    with start_prefill(*LAPS, "--tp-size", "2", "--laps-ttft-slo-ms", "2000", "--laps-config", knobs, env=env) as p:
        yield p


@pytest.mark.timeout(500)
def test_a_thousand_mixed_requests_in_step(prefill: Prefill, reference: Reference) -> None:
    rng = random.Random(11)
    prompts = [ids(i, 2 * CHUNK + i % 40 if i % 50 == 0 else rng.randint(4, 60)) for i in range(1000)]
    got = asyncio.run(send_all(prefill, prompts, spread_s=20.0))
    for i in range(0, 1000, 25):
        assert got[i] == reference.greedy(prompts[i], 1)[0], f"prompt {i} of {len(prompts[i])} tokens"
    totals = prefill.totals()
    assert totals["long"]["tokens"] >= sum(len(p) for p in prompts if len(p) > 256)
    assert sum(prefill.get("/laps_status")["window"]["dispatched"].values()) >= totals["short"]["batches"]


def test_aborts_stay_in_step(prefill: Prefill) -> None:
    async def scenario() -> None:
        sending = [asyncio.ensure_future(send_all(prefill, [ids(5000 + i, 4 * CHUNK)])) for i in range(4)]
        await asyncio.sleep(0.3)
        assert prefill.post("/abort_request", {"rid": "", "abort_all": True})[0] == 200
        await asyncio.gather(*sending, return_exceptions=True)
        assert len(await send_all(prefill, [ids(i, 30) for i in range(8)])) == 8

    asyncio.run(scenario())
    prefill.all_tokens_are_free()
