"""Context parallelism divides every request of a step among its ranks; requests too short for that run apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from laps_core.config import LapsConfig
from sglang_laps.classes import Classes

from .adders import Cache, adder, fill_batch, make_request

__all__ = ["adder"]
LEAST = 8
"""Fewest new tokens of a request that can be divided: two for each of four ranks."""


def batch(waiting: Sequence[int], *, begun: Any = None, chunk: int = 512, least: int = LEAST) -> list[int]:
    """Build a batch of requests with these lengths and return the new tokens of each request in it."""
    from sglang_laps.adder import LapsPrefillAdder

    classes = Classes(LapsConfig(), 256, lambda _: 0, lambda: 0.0)
    make = partial(LapsPrefillAdder, classes, lambda _: None, reserve=0, least=least)
    made, _ = fill_batch(make, Cache(), [make_request(n) for n in waiting], chunk, begun)
    return [r.extend_len for r in made.can_run_list]


@pytest.mark.parametrize(
    ("waiting", "built"),
    [
        ([5, 7, 8, 100], [5, 7]),
        ([8, 100, 7, 60], [8, 100]),
        ([100, 60], [100, 60]),
        ([7, 7], [7, 7]),
        # 505 tokens leave too few of the chunk (512) to divide the next request.
        ([505, 300], [505]),
        ([504, 300], [504, 8]),
    ],
)
def test_divisible_and_indivisible_requests_use_separate_batches(
    adder: Callable[[int, int], Any], waiting: list[int], built: list[int]
) -> None:
    assert batch(waiting) == built


def test_all_requests_share_batch_without_context_parallelism(adder: Callable[[int, int], Any]) -> None:
    assert batch([5, 8, 100], least=0) == [5, 8, 100]
    assert batch([505, 300], least=0) == [505, 7]


@pytest.mark.parametrize(("left", "built"), [(7, [7]), (8, [8, 100]), (300, [300, 100])])
def test_rest_of_prompt_is_classified_by_remaining_tokens(
    adder: Callable[[int, int], Any], left: int, built: list[int]
) -> None:
    begun = make_request(1000)
    begun.extend_end = 1000 - left
    assert batch([100, 5], begun=begun) == built


def test_min_divisible_tokens_depends_on_cp_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    import sglang_laps.ranks as module

    parallel = SimpleNamespace(
        attn_tp_rank=0, attn_tp_size=1, attn_cp_rank=1, attn_cp_size=4, attn_dp_rank=0, dp_rank=None, pp_rank=0,
        pp_size=1, cp_strategy="zigzag", enable_prefill_cp=True,
    )  # fmt: skip
    monkeypatch.setattr(module, "get_parallel", lambda: parallel)
    assert module.Ranks(None, None).min_divisible_tokens == LEAST
    parallel.cp_strategy = "interleave"  # this strategy divides all tokens of a step, regardless of request boundaries
    assert module.Ranks(None, None).min_divisible_tokens == 0
    parallel.cp_strategy, parallel.enable_prefill_cp = "zigzag", False
    assert module.Ranks(None, None).min_divisible_tokens == 0
