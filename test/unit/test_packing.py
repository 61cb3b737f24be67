"""Which long prompts share a batch, and which are small enough to overtake one that runs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from laps_core.policy.batching import AHEAD, pack
from laps_core.policy.preemption import overtake
from laps_core.policy.types import Waiting

F = 0.005


def item(tokens: int, started: bool = False) -> Waiting:
    return Waiting(tokens, 0, 0.0, started=started)


def beside_s(w: Waiting) -> float:
    return w.tokens * 25e-6


def test_a_lone_prompt_fills_the_batch_and_is_cut() -> None:
    assert pack([item(20_000)], beside_s, budget=8192, fixed_s=F, waiting=1) == [0]


def test_where_few_wait_the_next_one_would_only_delay_the_first() -> None:
    assert pack([item(1000), item(2000)], beside_s, budget=8192, fixed_s=F, waiting=2) == [0]


def test_where_many_wait_a_saved_step_is_worth_more() -> None:
    crowd = [item(300 + i) for i in range(12)]
    packed = pack(crowd, beside_s, budget=8192, fixed_s=F, waiting=40)
    assert len(packed) > 4


def test_what_does_not_pay_is_not_cut_in_either() -> None:
    assert pack([item(1000), item(50_000)], beside_s, budget=8192, fixed_s=F, waiting=2) == [0]


def test_one_prompt_in_progress_at_most() -> None:
    packed = pack([item(300, True), item(400, True), item(500)], beside_s, budget=8192, fixed_s=1.0, waiting=9)
    assert packed == [0, 2]


@given(
    sizes=st.lists(st.tuples(st.integers(1, 30_000), st.booleans()), min_size=1, max_size=30),
    budget=st.integers(1, 16_384),
    waiting=st.integers(1, 500),
)
def test_a_pack_keeps_the_rules(sizes: list[tuple[int, bool]], budget: int, waiting: int) -> None:
    items = [item(*s) for s in sizes]
    packed = pack(items, beside_s, budget=budget, fixed_s=F, waiting=waiting)
    assert packed[0] == 0
    assert packed == sorted(set(packed))
    assert sum(items[i].started for i in packed) <= 1
    whole = sum(items[i].tokens for i in packed[:-1])
    assert whole < budget, "only the last is cut"


def test_small_ones_overtake_what_runs_for_long() -> None:
    items = [item(400), item(500)]
    picked = overtake(items, beside_s, budget=8192, left_s=0.15, running=1, fixed_s=F, waiting=3)
    assert picked == [0, 1]


def test_nobody_overtakes_what_is_nearly_done() -> None:
    assert not overtake([item(400)], beside_s, budget=8192, left_s=0.01, running=1, fixed_s=F, waiting=3)


def test_nobody_overtakes_for_nothing() -> None:
    """One gains what the running batch still needs, which is delayed by the step: one second for it, one for him."""
    for left_s, pays in ((2.0, False), (2.25, True)):
        picked = overtake([item(1)], lambda w: 1.0, budget=8, left_s=left_s, running=1, fixed_s=1.0, waiting=1)
        assert picked == ([0] if pays else [])


def test_near_saturation_the_fixed_cost_of_all_who_wait_decides() -> None:
    one = [item(600)]
    many = int(0.1 / (F * AHEAD)) + 10
    assert overtake(one, beside_s, budget=8192, left_s=0.1, running=1, fixed_s=F, waiting=2)
    assert not overtake(one, beside_s, budget=8192, left_s=0.1, running=1, fixed_s=F, waiting=many)


def test_whoever_overtakes_runs_whole() -> None:
    assert not overtake([item(9000)], beside_s, budget=8192, left_s=9.0, running=1, fixed_s=F, waiting=1)
    assert not overtake([item(400, True)], beside_s, budget=8192, left_s=9.0, running=1, fixed_s=F, waiting=1)


@given(
    sizes=st.lists(st.integers(257, 30_000), max_size=20),
    left_s=st.floats(0.0, 2.0),
    running=st.integers(1, 20),
    waiting=st.integers(0, 300),
)
def test_an_overtaking_batch_is_worth_it(sizes: list[int], left_s: float, running: int, waiting: int) -> None:
    items = [item(n) for n in sorted(sizes)]
    packed = overtake(items, beside_s, budget=8192, left_s=left_s, running=running, fixed_s=F, waiting=waiting)
    n = len(packed)
    if not n:
        return
    seconds = F + sum(beside_s(items[i]) for i in packed)
    assert sum(items[i].tokens for i in packed) <= 8192
    assert seconds <= left_s
    assert n * left_s > running * seconds, "those who gain outweigh those who lose"


def test_one_goes_along_while_the_sum_of_latencies_falls() -> None:
    pair = [item(100), item(500)]  # 12.5 ms more for the first, against AHEAD fixed times for each who waits
    for waiting, picked in ((2, [0]), (3, [0, 1])):
        assert pack(pair, beside_s, budget=8192, fixed_s=F, waiting=waiting) == picked


def test_those_who_just_fit_overtake() -> None:
    def quarter(_: Waiting) -> float:
        return 0.25

    pair = [item(400), item(600)]
    for budget, left_s, picked in ((1000, 1.0, [0, 1]), (999, 1.0, []), (1000, 0.999, [])):
        found = overtake(pair, quarter, budget=budget, left_s=left_s, running=1, fixed_s=0.5, waiting=2)
        assert found == picked


def test_nobody_else_waits_so_only_the_running_ones_lose() -> None:
    assert overtake([item(500)], beside_s, budget=8192, left_s=0.03, running=1, fixed_s=F, waiting=1)
    assert not overtake([item(500)], beside_s, budget=8192, left_s=0.03, running=1, fixed_s=F, waiting=3)
