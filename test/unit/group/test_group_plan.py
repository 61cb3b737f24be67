"""The joint plan: equal decisions on all ranks, no idling, no starvation, synchronized steps from any start."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from groups import CHUNK, COST, Group, add_prompts
from hypothesis import given, settings
from hypothesis import strategies as st
from laps_core.group.choice import choose, step_s
from laps_core.group.cost import GRAIN, GroupCost
from laps_core.group.menu import LADDER, Menu
from laps_core.group.offer import FIRST_SHARE

LENGTHS = st.tuples(st.integers(1, 300) | st.integers(1, 131_072), st.just(0) | st.integers(0, 131_072))
QUEUES = st.lists(st.lists(LENGTHS, max_size=5), min_size=4, max_size=4)


@settings(deadline=None, max_examples=25)
@given(queues=QUEUES, padded=st.booleans(), guard=st.sampled_from((0.0, 0.15, 1.0)))
def test_dp_ranks_agree_and_never_idle_while_prompts_wait(
    queues: list[list[tuple[int, int]]], padded: bool, guard: float
) -> None:
    group = Group(replace(COST, padded=padded), guard=guard)
    add_prompts(group, queues)
    owed = sum(new for queue in queues for new, _ in queue)
    for _ in range(4000):
        if not owed:
            break
        assert group.step() is not None
        assert group.tokens() > 0
        owed -= group.tokens()
    assert owed == 0
    assert group.step() is None


def test_budget_grows_with_waiting_work() -> None:
    few, many = Group(), Group()
    add_prompts(few, [[(2000, 0)]] * 4)
    add_prompts(many, [[(2000, 0)] * 20] * 4)
    a, b = few.step(), many.step()
    assert a is not None
    assert b is not None
    assert a.level < b.level


def test_smallest_budget_is_chosen_only_for_short_requests() -> None:
    short, long = Group(), Group()
    add_prompts(short, [[(50, 0)]] * 4)
    add_prompts(long, [[(50, 0)], [(400, 0)] * 3, [(90_000, 0)], []])
    a, b = short.step(), long.step()
    assert a is not None
    assert b is not None
    assert a.level == 0 < b.level


def test_predicted_step_time_matches_elapsed_time() -> None:
    group = Group()
    add_prompts(group, [[(3000, 0), (100, 50_000)], [(9000, 20_000)], [], [(1, 0)]])
    choice = group.step()
    assert choice is not None
    assert group.now == pytest.approx(choice.seconds, rel=1e-4)
    assert 0.0 < choice.waits < 1.0


def test_dp_rank_with_long_work_stays_within_budget() -> None:
    group = Group()
    add_prompts(group, [[(120_000, 0)], *[[(100, 0)] * 3] * 3])
    choice = group.step()
    assert choice is not None
    assert choice.own_s[0] <= LADDER[choice.level]
    assert sum(p.tokens <= 100 for ran in group.ran for p, _ in ran) == 9


def test_idle_dp_ranks_choose_no_step() -> None:
    group = Group()
    menus = [planner.menu(0.0, []) for planner in group.planners]
    assert choose(menus) is None
    assert step_s(menus, 3, padded=False) == 0.0


def test_dp_ranks_with_different_cost_terms_decide_alike() -> None:
    """Each rank fits its own terms, but all ranks must make the same decision."""
    group = Group()
    add_prompts(group, [[(3000, 0)]] * 4)
    for i, planner in enumerate(group.planners):
        planner.cost = replace(COST, fixed=0.01 * (i + 1), expert=COST.expert * (i + 1))
    assert group.step() is not None


@settings(deadline=None, max_examples=3)
@given(seed=st.integers(0, 1 << 30), guard=st.sampled_from((0.1, 0.15, 0.5)))
def test_guard_bounds_wait_of_oldest_long_prompts(seed: int, guard: float) -> None:
    """Shorter long prompts overload all ranks; each rank's oldest long prompt still ends in time."""
    rng, group = random.Random(seed), Group(guard=guard)
    left = {rank: group.add(rank, rng.randint(20_000, 40_000)).tokens for rank in range(4)}
    group.now, longest, turns = 1.0, 0.0, 0
    while left:
        for rank in range(4):
            while len(group.waiting[rank]) < 8:
                group.add(rank, rng.randint(2000, 6000))
        begin = group.now
        choice = group.step()
        assert choice is not None
        longest = max(longest, group.now - begin)
        turns += choice.oldest
        for rank, ran in enumerate(group.ran):
            mine = next((n for p, n in ran if p.since_s == 0.0), 0)
            if choice.oldest and rank in left:
                least = GRAIN * COST.token + COST.attention_s(GRAIN, 40_000)
                own = COST.token * mine + COST.attention_s(mine, 40_000)
                share = FIRST_SHARE * LADDER[choice.level] - least
                assert mine == left[rank] or mine >= FIRST_SHARE * CHUNK or own >= share
            if mine:
                left[rank] -= mine
                if not left[rank]:
                    del left[rank]
        assert group.now - 1.0 <= (turns + 1) * longest / guard


def test_long_prompt_starves_without_guard() -> None:
    group = Group(guard=0.0)
    victim = group.add(0, 40_000)
    while group.now < 20.0:
        for rank in range(4):
            while len(group.waiting[rank]) < 8:
                group.add(rank, 3000)
        group.step()
    assert victim in group.waiting[0]


LINEAR = replace(COST, alpha=4e-10, unpack=0.0, absorbed=None)
"""Terms of sparse attention, whose cost hardly grows with the history."""


def saturated(cost: GroupCost, phases: list[int]) -> Group:
    """Return ranks with equal long prompts; ``phases``: chunks of the first prompt that each rank has already run."""
    group = Group(cost)
    add_prompts(group, [[(16_384, 0)] * 30] * 4)
    for waiting, chunks in zip(group.waiting, phases, strict=True):
        waiting[0] = waiting[0].after(cost, chunks * CHUNK)
    return group


def after_20_steps(group: Group, steps: int = 30) -> tuple[float, float]:
    """Return (tokens/s, share of rank-time spent waiting for the slowest rank) of ``steps`` steps after 20 others."""
    for _ in range(20):
        group.step()
    begin, tokens, waited = group.now, 0, 0.0
    for _ in range(steps):
        choice = group.step()
        assert choice is not None
        tokens, waited = tokens + group.tokens(), waited + choice.waits * choice.seconds
    return tokens / (group.now - begin), waited / (group.now - begin)


@pytest.mark.parametrize(("cost", "least"), [(LINEAR, 0.99), (COST, 0.98)], ids=["sparse attention", "MLA"])
@pytest.mark.parametrize("phases", [[0, 1, 0, 1], [0, 1, 1, 1]])
def test_dp_ranks_one_chunk_apart_synchronize_again(cost: GroupCost, least: float, phases: list[int]) -> None:
    """SGLang #35241: under the prefill delayer ranks that are whole chunks apart stay so, and lose a third permanently.

    MLA pays for its history in each chunk, so the tokens/s of such ranks differ even if no rank waits for another.
    """
    apart, waited = after_20_steps(saturated(cost, phases))
    together, _ = after_20_steps(saturated(cost, [0] * 4))
    assert apart >= least * together
    assert waited < 0.01


def test_menu_row_of_wrong_length_is_rejected() -> None:
    group = Group()
    with pytest.raises(ValueError, match="numbers"):
        Menu.read([*group.planners[0].menu(0.0, []).row(), 0])
