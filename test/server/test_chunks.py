"""Where long prompts are cut: SGLang rounds a cut down to its pages and its alignment, and what it rounds to nothing
would never start."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from sglang_laps.pacing import LongWork, Pacer
from sglang_laps.policy.config import LapsConfig

from .adders import Prompt, adder
from .conftest import LAPS, Reference
from .test_prefill_server import ids, send_all

__all__ = ["adder"]
SERVER_CHUNK = 10_000 // 64 * 64


@pytest.mark.parametrize(("page", "align"), [(1, None), (64, None), (1, 4096), (64, 4096), (48, 4096), (64, 96)])
@pytest.mark.parametrize("wanted", [None, 100, 5000, 9999])
@pytest.mark.parametrize("slack_s", [None, 1e-4, 0.02, 0.3])
def test_every_long_prompt_runs_to_its_end_in_whole_units(
    adder: Callable[[int, int], Any], page: int, align: int | None, wanted: int | None, slack_s: float | None
) -> None:
    unit = page if align is None else {(1, 4096): 4096, (64, 4096): 4096, (48, 4096): 12288, (64, 96): 192}[page, align]
    wanted = None if wanted is None else max(wanted, unit)
    server_chunk = max(SERVER_CHUNK, unit)
    me = Pacer(
        LapsConfig(long_chunk_tokens=wanted, wait_window_ms=0.0),
        threshold=256,
        chunk_tokens=server_chunk,
        page_size=page,
        align=align,
    )
    me.model.predict = lambda requests: sum(1e-4 * new for new, _ in requests)  # type: ignore[method-assign]
    shorts = [] if slack_s is None else [(1, 0, 0.0, slack_s + 1e-4, "short")]
    prompt = Prompt(30_000)
    cuts = []
    while prompt.extend_end < 30_000:
        done = prompt.extend_end
        plan = me.plan(0.0, shorts, [], short=bool(shorts), long=LongWork(30_000 - done, done, 0.0, 30_000))
        builder = adder(page, min(plan.chunk_tokens or server_chunk, server_chunk))
        prompt.prefix_len = done
        if done == 0:
            builder.add_one_req(prompt, has_chunked_req=False, truncation_align_size=align)
        else:
            builder.add_chunked_req(prompt)
        cuts.append(prompt.extend_end - done)
        assert cuts[-1] > 0, f"nothing of the prompt fits a chunk of {plan.chunk_tokens}"
    assert all(cut % unit == 0 for cut in cuts[:-1]), cuts
    assert max(cuts) <= max(wanted or server_chunk, unit)


@pytest.mark.timeout(300)
def test_a_server_with_pages_cuts_long_prompts_into_whole_pages(
    start_prefill: Callable[..., Any], reference: Reference
) -> None:
    pages = ("--page-size", "64", "--laps-config", '{"long_chunk_tokens": 100}')
    with start_prefill(*LAPS, *pages) as server:
        prompts = [ids(1, 300), ids(2, 700)]
        for prompt in prompts:
            before = server.totals()["long"]["batches"]
            assert asyncio.run(send_all(server, [prompt])) == reference.greedy(prompt, 1)
            assert server.totals()["long"]["batches"] - before == -(-len(prompt) // 64)
        assert len(asyncio.run(send_all(server, prompts + [ids(3, 60)] * 8, spread_s=0.2))) == 10
        server.all_tokens_are_free()
        server.must_be_clean()
