"""Selection of long prompts that share a batch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from laps_core.policy.batching import pack
from laps_core.policy.types import Waiting

F = 0.005


def item(tokens: int, started: bool = False) -> Waiting:
    return Waiting(tokens, 0, 0.0, started=started)


def sizes(fixed_s: float = F) -> Any:
    return SimpleNamespace(beside_s=lambda w: w.tokens * 25e-6, fixed_s=fixed_s)


def test_a_lone_prompt_fills_the_batch_and_is_cut() -> None:
    assert pack([item(20_000)], sizes(), budget=8192, waiting=1) == [0]


def test_where_few_wait_the_next_one_would_only_delay_the_first() -> None:
    assert pack([item(1000), item(2000)], sizes(), budget=8192, waiting=2) == [0]


def test_where_many_wait_a_saved_step_is_worth_more() -> None:
    crowd = [item(300 + i) for i in range(12)]
    packed = pack(crowd, sizes(), budget=8192, waiting=40)
    assert len(packed) > 4


def test_what_does_not_pay_is_not_cut_in_either() -> None:
    assert pack([item(1000), item(50_000)], sizes(), budget=8192, waiting=2) == [0]


def test_one_prompt_in_progress_at_most() -> None:
    packed = pack([item(300, True), item(400, True), item(500)], sizes(1.0), budget=8192, waiting=9)
    assert packed == [0, 2]


@given(
    spec=st.lists(st.tuples(st.integers(1, 30_000), st.booleans()), min_size=1, max_size=30),
    budget=st.integers(1, 16_384),
    waiting=st.integers(1, 500),
)
def test_a_pack_keeps_the_rules(spec: list[tuple[int, bool]], budget: int, waiting: int) -> None:
    items = [item(*s) for s in spec]
    packed = pack(items, sizes(), budget=budget, waiting=waiting)
    assert packed[0] == 0
    assert packed == sorted(set(packed))
    assert sum(items[i].started for i in packed) <= 1
    whole = sum(items[i].tokens for i in packed[:-1])
    assert whole < budget, "only the last is cut"


def test_one_goes_along_while_the_sum_of_latencies_falls() -> None:
    pair = [item(100), item(500)]  # costs the first 12.5 ms more, and saves each waiting prompt AHEAD fixed times
    for waiting, picked in ((2, [0]), (3, [0, 1])):
        assert pack(pair, sizes(), budget=8192, waiting=waiting) == picked
