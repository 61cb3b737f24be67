"""Offers of a rank, and their format between ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from groups import CHUNK, COST, prompt
from hypothesis import given, settings
from hypothesis import strategies as st
from laps_core.group.cost import OwnShape
from laps_core.group.menu import LADDER, ROW, Level, Menu, Terms, Waits
from laps_core.group.offer import Offer
from laps_core.group.prompt import Prompt

PROMPTS = st.lists(
    st.builds(prompt, st.integers(1, 131_072) | st.integers(1, 300), st.integers(0, 131_072), st.floats(-100.0, 0.0)),
    max_size=12,
)
WHOLE = st.integers(-(1 << 62), 1 << 62)


def takes(prompts: list[Prompt], offer: Offer, level: int) -> float:
    picks = offer.picks(level)
    own = sum(COST.attention_s(n, prompts[i].history) for i, n in picks)
    return COST.own_s(sum(n for _, n in picks), own)


@settings(deadline=None, max_examples=50)
@given(prompts=PROMPTS, started=st.sets(st.integers(0, 11)))
def test_a_step_that_preempts_is_of_whole_requests_none_of_which_was_begun(
    prompts: list[Prompt], started: set[int]
) -> None:
    prompts = [p._replace(started=i in started) for i, p in enumerate(prompts)]
    offer = Offer(COST, prompts, chunk=CHUNK, whole=True)
    for k in range(len(LADDER)):
        for i, n in offer.picks(k):
            assert (n, prompts[i].started) == (prompts[i].tokens, False)


@settings(deadline=None, max_examples=50)
@given(prompts=PROMPTS, first=st.booleans(), chunk=st.integers(1, CHUNK))
def test_every_batch_is_within_its_budget_but_for_what_must_go_on(
    prompts: list[Prompt], first: bool, chunk: int
) -> None:
    offer = Offer(COST, prompts, chunk=chunk, first=0 if first and prompts else None)
    for k, budget in enumerate(LADDER):
        picks, level = offer.picks(k), offer.levels[k]
        assert level.tokens == sum(n for _, n in picks) <= chunk
        assert len({i for i, _ in picks}) == len(picks)
        assert all(0 < n <= prompts[i].tokens for i, n in picks)
        own = takes(prompts, offer, k)
        assert level.own_us == pytest.approx(1e6 * own, abs=1)
        forced = k == len(LADDER) - 1 and len(picks) == 1 and picks[0].tokens <= 64
        assert forced or own <= budget * (1 + 1e-9)


@settings(deadline=None, max_examples=50)
@given(prompts=PROMPTS, first=st.booleans())
def test_the_largest_budget_always_runs_something(prompts: list[Prompt], first: bool) -> None:
    offer = Offer(COST, prompts, chunk=CHUNK, first=0 if first and prompts else None)
    assert bool(offer.picks(len(LADDER) - 1)) == bool(prompts)


@settings(deadline=None, max_examples=30)
@given(prompts=PROMPTS)
def test_what_goes_first_makes_progress_from_its_least_level_on(prompts: list[Prompt]) -> None:
    for first in range(len(prompts)):
        offer = Offer(COST, prompts, chunk=CHUNK, first=first)
        least = offer.least()
        assert any(i == first for i, _ in offer.picks(least))
        assert all(i != first for k in range(least) for i, _ in offer.picks(k))


def test_least_work_goes_first_and_the_next_is_cut() -> None:
    prompts = [prompt(20_000), prompt(100), prompt(5000)]
    offer = Offer(COST, prompts, chunk=CHUNK)
    picks = offer.picks(len(LADDER) - 1)
    assert [i for i, _ in picks] == [1, 2, 0]
    assert [n for _, n in picks[:2]] == [100, 5000]
    assert picks[2].tokens == CHUNK - 5100


def test_what_goes_first_leaves_half_the_budget_to_short_requests() -> None:
    prompts = [prompt(50_000), *[prompt(100)] * 8]
    offer = Offer(COST, prompts, chunk=CHUNK, first=0)
    for k in (4, 8):
        picks = dict(offer.picks(k))
        own = COST.token * picks[0] + COST.attention_s(picks[0], 0)
        assert own >= 0.45 * LADDER[k]
        assert len(picks) == 9


def test_a_history_is_not_unpacked_for_a_few_tokens() -> None:
    prompts = [prompt(4000, 60_000)]
    offer = Offer(COST, prompts, chunk=CHUNK)
    unpack = 4.4e-6 * 60_000
    for k, budget in enumerate(LADDER[:-1]):
        assert bool(offer.picks(k)) == (budget > 2 * unpack * 0.999), k


def test_no_room_no_batch() -> None:
    assert not any(level.tokens for level in Offer(COST, [prompt(100)], chunk=0).levels)


@settings(deadline=None, max_examples=20)
@given(
    levels=st.lists(st.builds(Level, WHOLE, WHOLE, WHOLE, WHOLE), min_size=len(LADDER), max_size=len(LADDER)),
    waits=st.builds(Waits, WHOLE, WHOLE, WHOLE, WHOLE, WHOLE),
    terms=st.builds(Terms, WHOLE, WHOLE, WHOLE, WHOLE),
    ran=st.builds(OwnShape, WHOLE, WHOLE, WHOLE, WHOLE),
)
def test_a_menu_crosses_as_whole_numbers(levels: list[Level], waits: Waits, terms: Terms, ran: OwnShape) -> None:
    menu = Menu(tuple(levels), waits, terms, ran)
    row = menu.row()
    assert len(row) == ROW
    assert Menu.read(row) == menu
    with pytest.raises(ValueError, match="ranks"):
        Menu.read(row[1:])


def test_experts_that_pad_are_counted_so() -> None:
    padded = replace(COST, padded=True)
    assert padded.lone_s(8000, 0, CHUNK) > COST.lone_s(8000, 0, CHUNK)
