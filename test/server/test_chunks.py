"""Where long prompts are cut: SGLang rounds a cut down to its pages and its alignment, and what it rounds to nothing
would never start."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from sglang_laps.pacing import Pacer
from sglang_laps.plan import LongWaiting, Plan
from sglang_laps.policy.config import LapsConfig
from sglang_laps.policy.latency import Coefficients
from sglang_laps.policy.length import unit_of

from benchmark.sim.profile import Profile

from .adders import Prompt, adder
from .conftest import CHUNK, LAPS, Reference
from .test_prefill_server import ids, send_all

__all__ = ["adder"]
SERVER_CHUNK = 10_000 // 64 * 64
TOKENS = 30_000


@pytest.mark.parametrize(("page", "align"), [(1, None), (64, None), (1, 4096), (64, 4096), (48, 4096), (64, 96)])
@pytest.mark.parametrize("gap_s", [None, 1e-3, 0.02, 0.3])
@pytest.mark.parametrize("beside", [[], [1], [50, 65, 200]])
def test_every_long_prompt_runs_to_its_end_in_whole_units(
    adder: Callable[[int, int], Any], page: int, align: int | None, gap_s: float | None, beside: list[int]
) -> None:
    """In slices, and (`gap_s`) in chunks as long as the gap at most, `beside` short requests that come with each."""
    unit = unit_of(page, align)
    server_chunk = max(SERVER_CHUNK, unit)
    layers = 28 if gap_s is None else 0
    me = Pacer(LapsConfig(preempt_overhead=1.0), threshold=256, chunk_tokens=server_chunk, unit=unit, layers=layers)
    me.model = Profile(
        name="test", source="made up", coefficients=Coefficients(0.0, 1e-4, 0.0, 0.0, gap_s or 5e-3)
    ).model()
    prompt = Prompt(TOKENS)
    cuts: list[int] = []
    while prompt.extend_end < TOKENS:
        done = prompt.extend_end
        shorts = [(tokens, 0, 0.0, None, i) for i, tokens in enumerate(beside if gap_s else [])]
        plan = me.plan(0.0, shorts, [LongWaiting(TOKENS - done, done, 0.0, None, TOKENS, done > 0)])
        assert plan.mixed == bool(shorts)
        joined = [Prompt(tokens) for tokens, *_ in shorts]
        take(adder(page, plan.tokens), plan, prompt, joined, page, unit, align)
        cuts.append(prompt.extend_end - done)
        assert cuts[-1] > 0, f"nothing of the prompt fits a batch of {plan.tokens}"
        if done + cuts[-1] + unit * len(joined) < TOKENS:
            assert all(p.extend_end for p in joined[:1]), "the first short request shares the step"
    # Behind others SGLang rounds to its alignment, then to pages: whole units where the one divides the other.
    whole = unit if not (beside and gap_s) or (align or 0) % page == 0 else page
    assert all(cut % whole == 0 for cut in cuts[:-1]), cuts
    assert max(cuts) <= server_chunk


def take(
    builder: Any, plan: Plan, prompt: Prompt, joined: list[Prompt], page: int, unit: int, align: int | None
) -> None:
    """As SGLang's builder does: the prompt in progress, then those that wait, the short ones before the long one."""
    prompt.prefix_len = done = prompt.extend_end
    if done:
        pages = sum(-(-len(p.full_untruncated_fill_ids) // page) * page for p in joined)
        builder.chunked_req_limit = max(1, (plan.tokens - pages) // unit) * unit
        builder.add_chunked_req(prompt)
    for other in [*joined, *([] if done else [prompt])]:
        builder.add_one_req(other, has_chunked_req=bool(done), truncation_align_size=align)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("slice_ms", [4, 0])
def test_a_server_with_pages_cuts_long_prompts_into_whole_pages(
    start_prefill: Callable[..., Any], reference: Reference, slice_ms: int
) -> None:
    pages = ("--page-size", "64", "--laps-config", f'{{"slice_ms": {slice_ms}}}')
    with start_prefill(*LAPS, *pages) as server:
        prompts = [ids(1, 300), ids(2, 700)]
        for prompt in prompts:
            before = server.totals()["long"]["batches"]
            assert asyncio.run(send_all(server, [prompt])) == reference.greedy(prompt, 1)
            batches = server.totals()["long"]["batches"] - before
            assert batches == -(-len(prompt) // CHUNK) if slice_ms else batches >= -(-len(prompt) // CHUNK)
        status = server.get("/laps_status")["slices"]
        assert status == {"on": slice_ms > 0, "why_not": None if slice_ms else "slice_ms is 0"}
        assert len(asyncio.run(send_all(server, prompts + [ids(3, 60)] * 8, spread_s=0.2))) == 10
        server.all_tokens_are_free()
        server.must_be_clean()
