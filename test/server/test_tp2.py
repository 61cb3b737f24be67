"""Two TP ranks: all ranks make the same decisions, although the window depends on the clock."""

from __future__ import annotations

import asyncio
import random

import http_load as load
import pytest
from served import CHUNK, LAPS, Prefill, Reference, Setup, abort_everything, random_prompt, run_on, send_all

TP2 = Setup(
    "tp2",
    (*LAPS, "--tp-size", "2", "--laps-ttft-slo-ms", "2000", "--laps-config", '{"guard": 0.4}'),
    {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"},
)
pytestmark = run_on(TP2)


@pytest.mark.timeout(600)
def test_tp_ranks_give_correct_tokens_under_mixed_load(prefill: Prefill, reference: Reference) -> None:
    rng = random.Random(11)
    prompts = [random_prompt(i, 2 * CHUNK + i % 40 if i % 50 == 0 else rng.randint(4, 60)) for i in range(500)]
    got = asyncio.run(send_all(prefill, prompts, spread_s=5.0))
    for i in range(0, 500, 25):
        assert got[i] == reference.greedy(prompts[i], 1)[0], f"prompt {i} of {len(prompts[i])} tokens"
    totals = prefill.totals()
    assert totals["long"]["tokens"] >= sum(len(p) for p in prompts if len(p) > 256)
    assert sum(prefill.get("/laps_status")["window"]["dispatched"].values()) >= totals["short"]["batches"]


def test_tp_ranks_serve_after_aborting_all_requests(prefill: Prefill) -> None:
    asyncio.run(abort_everything(prefill, [random_prompt(5000 + i, 4 * CHUNK) for i in range(4)], short_requests=8))
    prefill.require_all_tokens_free()


def test_new_weights_that_one_rank_cannot_read_are_refused(prefill: Prefill) -> None:
    """The other rank, which can read its own, would wait for this one forever."""
    from sglang.srt.utils import MultiprocessingSerializer

    weights = MultiprocessingSerializer.serialize([], output_str=True)
    assert prefill.post("/begin_weight_update")[0] == 200
    for given, wanted in (([weights], 400), ([weights, weights], 200)):
        status, answer = prefill.post("/update_weights_from_tensor", {"serialized_named_tensors": given})
        assert status == wanted, answer
    assert prefill.post("/end_weight_update")[0] == 200
    assert len(asyncio.run(send_all(prefill, [random_prompt(5010, 30)]))) == 1


@pytest.mark.timeout(600)
def test_tokens_are_correct_under_status_polling(prefill: Prefill, reference: Reference) -> None:
    """Requests share prompts that are being prefilled, so their class depends on the time of the cache lookup."""
    documents = [random_prompt(7000 + i, 3 * CHUNK) for i in range(4)]
    prompts = [[*documents[i % 4], *random_prompt(8000 + i, 20)] for i in range(36)] + documents

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
    prefill.require_all_tokens_free()
