"""Selection of long prompts that share a batch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from laps_core.length import whole_units
from laps_core.policy.batching import pack
from laps_core.policy.types import Waiting

F = 0.005


def item(tokens: int, started: bool = False) -> Waiting:
    return Waiting(tokens, 0, 0.0, started=started)


def sizes(fixed_s: float = F, unit: int = 1) -> Any:
    return SimpleNamespace(
        beside_s=lambda w: w.tokens * 25e-6,
        work_s=lambda w: fixed_s + w.tokens * 25e-6,
        fixed_s=fixed_s,
        whole_units=lambda tokens: whole_units(tokens, unit),
    )


def test_lone_prompt_may_exceed_token_budget() -> None:
    assert pack([item(20_000)], sizes(), budget=8192, waiting=1, now=0.0) == [0]


def test_pack_adds_no_prompt_if_few_requests_wait() -> None:
    assert pack([item(1000), item(2000)], sizes(), budget=8192, waiting=2, now=0.0) == [0]


def test_pack_adds_prompts_if_many_requests_wait() -> None:
    crowd = [item(300 + i) for i in range(12)]
    packed = pack(crowd, sizes(), budget=8192, waiting=40, now=0.0)
    assert len(packed) > 4


def test_pack_adds_no_part_of_large_prompt() -> None:
    pair = [item(1000), item(2000)]
    assert pack(pair, sizes(1.0), budget=3000, waiting=9, now=0.0) == [0, 1]
    assert pack(pair, sizes(1.0), budget=2999, waiting=9, now=0.0) == [0]


def test_pack_counts_whole_pages_of_each_prompt() -> None:
    pair = [item(700), item(705)]
    assert pack(pair, sizes(1.0, unit=64), budget=1408, waiting=9, now=0.0) == [0]
    assert pack(pair, sizes(1.0, unit=64), budget=1472, waiting=9, now=0.0) == [0, 1]


def test_pack_takes_at_most_one_prompt_in_progress() -> None:
    packed = pack([item(300, True), item(400, True), item(500)], sizes(1.0), budget=8192, waiting=9, now=0.0)
    assert packed == [0, 2]


@given(
    spec=st.lists(st.tuples(st.integers(1, 30_000), st.booleans()), min_size=1, max_size=30),
    budget=st.integers(1, 16_384),
    waiting=st.integers(1, 500),
)
def test_pack_keeps_order_and_exceeds_budget_only_with_lone_prompt(
    spec: list[tuple[int, bool]], budget: int, waiting: int
) -> None:
    items = [item(*s) for s in spec]
    packed = pack(items, sizes(), budget=budget, waiting=waiting, now=0.0)
    assert packed[0] == 0
    assert packed == sorted(set(packed))
    assert sum(items[i].started for i in packed) <= 1
    assert len(packed) == 1 or sum(items[i].tokens for i in packed) <= budget


def test_pack_adds_prompt_only_if_total_latency_falls() -> None:
    pair = [item(100), item(500)]  # costs the first 12.5 ms more, and saves each waiting prompt AHEAD fixed times
    for waiting, picked in ((2, [0]), (3, [0, 1])):
        assert pack(pair, sizes(), budget=8192, waiting=waiting, now=0.0) == picked


def test_pack_adds_no_prompt_that_makes_another_one_late() -> None:
    """The first two take 45 ms together, the third 75 ms more."""
    spec = ((600, 9.0), (1000, 0.06), (3000, None), (200, None))
    line = [item(tokens)._replace(deadline_s=due_s) for tokens, due_s in spec]
    assert pack(line, sizes(), budget=8192, waiting=200, now=0.0) == [0, 1, 3]
    late = [w._replace(deadline_s=None if w.deadline_s is None else w.deadline_s - 5.0) for w in line]
    assert pack(late, sizes(), budget=8192, waiting=200, now=0.0) == [0, 1, 2, 3], "late in any case"
    assert pack(line, sizes(), budget=8192, waiting=2, now=0.0) == [0], "it has to pay, too"
