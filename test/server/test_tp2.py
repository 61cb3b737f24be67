"""Two TP ranks: all ranks make the same decisions, although the window depends on the clock."""

from __future__ import annotations

import asyncio
import random

import http_load as load
import pytest
from served import CHUNK, LAPS, Prefill, Reference, Setup, abort_everything, ids, on, send_all

TP2 = Setup(
    "tp2",
    (*LAPS, "--tp-size", "2", "--laps-ttft-slo-ms", "2000", "--laps-config", '{"guard": 0.4}'),
    {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"},
)
pytestmark = on(TP2)


@pytest.mark.timeout(600)
def test_mixed_requests_in_step(prefill: Prefill, reference: Reference) -> None:
    rng = random.Random(11)
    prompts = [ids(i, 2 * CHUNK + i % 40 if i % 50 == 0 else rng.randint(4, 60)) for i in range(500)]
    got = asyncio.run(send_all(prefill, prompts, spread_s=5.0))
    for i in range(0, 500, 25):
        assert got[i] == reference.greedy(prompts[i], 1)[0], f"prompt {i} of {len(prompts[i])} tokens"
    totals = prefill.totals()
    assert totals["long"]["tokens"] >= sum(len(p) for p in prompts if len(p) > 256)
    assert sum(prefill.get("/laps_status")["window"]["dispatched"].values()) >= totals["short"]["batches"]


def test_aborts_stay_in_step(prefill: Prefill) -> None:
    asyncio.run(abort_everything(prefill, [ids(5000 + i, 4 * CHUNK) for i in range(4)], after=8))
    prefill.all_tokens_are_free()


@pytest.mark.timeout(600)
def test_status_asked_all_the_time_does_not_part_the_ranks(prefill: Prefill, reference: Reference) -> None:
    """Requests share prompts that are being prefilled, so their class depends on the time of the cache lookup."""
    documents = [ids(7000 + i, 3 * CHUNK) for i in range(4)]
    prompts = [[*documents[i % 4], *ids(8000 + i, 20)] for i in range(36)] + documents

    async def scenario() -> list[int]:
        sending = asyncio.ensure_future(send_all(prefill, prompts, spread_s=2.0))
        async with load.session() as http:
            while not sending.done():
                for path in ("/laps_status", "/metrics"):
                    async with http.get(prefill.server.url + path) as reply:
                        assert reply.status == 200
                await asyncio.sleep(0.01)
        return await sending

    got = asyncio.run(scenario())
    for i in range(0, len(prompts), 12):
        assert got[i] == reference.greedy(prompts[i], 1)[0]
    prefill.all_tokens_are_free()
