"""Two pipeline stages of two TP ranks each: one rank plans, and all four run the same batches."""

from __future__ import annotations

import asyncio

import pytest
from served import CHUNK, LAPS, Prefill, Reference, Setup, abort_everything, random_prompt, run_on

from .test_group_mixed import send
from .test_pp2 import mixed_prompts

FOUR = Setup("pp2-tp2", (*LAPS, "--pp-size", "2", "--tp-size", "2"), {"SGLANG_CPU_OMP_THREADS_BIND": "0|1|0|1"})
pytestmark = [pytest.mark.timeout(600), *run_on(FOUR)]
COUNT = 36


def test_mixed_load_with_aborts_gives_correct_tokens(prefill: Prefill, reference: Reference) -> None:
    before = prefill.totals()["long"]["batches"]
    prompts = mixed_prompts(7, COUNT)
    said = asyncio.run(send(prefill, prompts, seed=7))
    assert {i for i in range(COUNT) if i % 3} <= set(said)
    for i, answer in said.items():
        want, (logprob, token) = reference.next_token(prompts[i]), answer["meta_info"]["output_token_logprobs"][0][:2]
        assert (token, logprob) == (want[0], pytest.approx(want[1], abs=1e-3)), f"prompt {i}: {len(prompts[i])} tokens"
    assert prefill.totals()["long"]["batches"] > before, "LAPS has planned them"
    prefill.require_all_tokens_free()


def test_pp_and_tp_ranks_serve_after_aborting_all_requests(prefill: Prefill) -> None:
    asyncio.run(abort_everything(prefill, [random_prompt(6000 + i, 4 * CHUNK) for i in range(3)], short_requests=6))
    prefill.require_all_tokens_free()
