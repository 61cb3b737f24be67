"""Chunks of long prompts: SGLang rounds a chunk down to pages and alignment; a chunk rounded to nothing would never
start."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from laps_core.config import LapsConfig
from laps_core.latency.model import LatencyModel
from laps_core.latency.step import Coefficients
from laps_core.length import LONG, unit_of
from laps_core.policy.pacer import Pacer
from laps_core.policy.types import Waiting

from .adders import Prompt, adder

__all__ = ["adder"]
SERVER_CHUNK = 10_000 // 64 * 64


@pytest.mark.parametrize(("page", "align"), [(1, None), (64, None), (1, 4096), (64, 4096), (48, 4096), (64, 96)])
@pytest.mark.parametrize("layers", [0, 28])
@pytest.mark.parametrize("token_s", [None, 1e-6, 2e-5, 1e-2])
def test_long_prompt_completes_in_chunks_of_whole_units(
    adder: Callable[[int, int], Any], page: int, align: int | None, layers: int, token_s: float | None
) -> None:
    """Chunks have the server's size or, without slices, the length of the gap; SGLang can cut at both."""
    unit = {(1, 4096): 4096, (64, 4096): 4096, (48, 4096): 12288, (64, 96): 192}.get((page, align or 0), page)
    assert unit_of(page, align) == unit
    server_chunk = max(SERVER_CHUNK, unit)
    model = None if token_s is None else costing(token_s)
    pacer = Pacer(LapsConfig(), chunk_tokens=server_chunk, unit=unit, layers=layers, model=model)
    prompt = Prompt(30_000)
    cuts = []
    while prompt.extend_end < 30_000:
        done = prompt.extend_end
        plan = pacer.plan(0.0, [], [Waiting(30_000 - done, done, 0.0, None, 30_000, done > 0)])
        assert plan.order == (LONG,)
        builder = adder(page, min(plan.long.tokens, server_chunk))
        prompt.prefix_len = done
        if done == 0:
            builder.add_one_req(prompt, has_chunked_req=False, truncation_align_size=align)
        else:
            builder.add_chunked_req(prompt)
        cuts.append(prompt.extend_end - done)
        assert cuts[-1] > 0, f"nothing of the prompt fits a chunk of {plan.long.tokens}"
    assert all(cut % unit == 0 for cut in cuts[:-1]), cuts
    assert max(cuts) <= server_chunk


def costing(token_s: float) -> LatencyModel:
    """Return a latency model with this time per token (seconds) and a fixed time per step."""
    return LatencyModel(Coefficients(0.0, token_s, 0.0, 0.0, 0.005))
