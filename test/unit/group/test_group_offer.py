"""Offers of a rank, and their format between ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from groups import CHUNK, COST, make_prompt
from hypothesis import given, settings
from hypothesis import strategies as st
from laps_core.group.cost import OwnShape
from laps_core.group.menu import LADDER, ROW, Level, Menu, Terms, Waits
from laps_core.group.offer import Offer
from laps_core.group.prompt import Prompt

PROMPTS = st.lists(
    st.builds(
        make_prompt, st.integers(1, 131_072) | st.integers(1, 300), st.integers(0, 131_072), st.floats(-100.0, 0.0)
    ),
    max_size=12,
)
WHOLE = st.integers(-(1 << 62), 1 << 62)


def offer_seconds(prompts: list[Prompt], offer: Offer, level: int) -> float:
    picks = offer.picks(level)
    own = sum(COST.attention_s(n, prompts[i].history) for i, n in picks)
    return COST.own_s(sum(n for _, n in picks), own)


@settings(deadline=None, max_examples=50)
@given(prompts=PROMPTS, started=st.sets(st.integers(0, 11)))
def test_preempting_step_holds_only_whole_unstarted_requests(prompts: list[Prompt], started: set[int]) -> None:
    prompts = [p._replace(started=i in started) for i, p in enumerate(prompts)]
    offer = Offer(COST, prompts, chunk=CHUNK, whole=True)
    for k in range(len(LADDER)):
        for i, n in offer.picks(k):
            assert (n, prompts[i].started) == (prompts[i].tokens, False)
    # The largest budget takes any prompt of so little work.
    small = any(p.tokens <= 300 and not p.history and not p.started for p in prompts)
    assert offer.picks(len(LADDER) - 1) or not small


@settings(deadline=None, max_examples=50)
@given(prompts=PROMPTS, first=st.booleans(), chunk=st.integers(1, CHUNK))
def test_every_batch_stays_within_budget_except_forced_progress(prompts: list[Prompt], first: bool, chunk: int) -> None:
    offer = Offer(COST, prompts, chunk=chunk, first=0 if first and prompts else None)
    for k, budget in enumerate(LADDER):
        picks, level = offer.picks(k), offer.levels[k]
        assert level.tokens == sum(n for _, n in picks) <= chunk
        assert len({i for i, _ in picks}) == len(picks)
        assert all(0 < n <= prompts[i].tokens for i, n in picks)
        own = offer_seconds(prompts, offer, k)
        assert level.own_us == pytest.approx(1e6 * own, abs=1)
        forced = k == len(LADDER) - 1 and len(picks) == 1 and picks[0].tokens <= 64
        assert forced or own <= budget * (1 + 1e-9)


@settings(deadline=None, max_examples=50)
@given(prompts=PROMPTS, first=st.booleans(), units=st.sampled_from(((16, 16), (64, 64), (128, 128), (64, 192))))
def test_every_batch_fits_into_chunk_in_whole_pages(prompts: list[Prompt], first: bool, units: tuple[int, int]) -> None:
    """SGLang charges whole pages for each request, and rounds a cut down to the unit."""
    page, unit = units
    chunk = 10 * unit
    offer = Offer(COST, prompts, chunk=chunk, page=page, unit=unit, first=0 if first and prompts else None)
    for k, level in enumerate(offer.levels):
        picks = offer.picks(k)
        assert sum(-(-n // page) * page for _, n in picks) <= chunk
        assert all(n == prompts[i].tokens or n % unit == 0 for i, n in picks)
        assert level.tokens == sum(n for _, n in picks), "a step takes as long as its tokens, not its pages"
    assert bool(offer.picks(len(LADDER) - 1)) == bool(prompts)


@settings(deadline=None, max_examples=50)
@given(prompts=PROMPTS, first=st.booleans())
def test_largest_budget_always_runs_waiting_prompt(prompts: list[Prompt], first: bool) -> None:
    offer = Offer(COST, prompts, chunk=CHUNK, first=0 if first and prompts else None)
    assert bool(offer.picks(len(LADDER) - 1)) == bool(prompts)


@settings(deadline=None, max_examples=30)
@given(prompts=PROMPTS)
def test_first_prompt_is_picked_from_its_least_level(prompts: list[Prompt]) -> None:
    for first in range(len(prompts)):
        offer = Offer(COST, prompts, chunk=CHUNK, first=first)
        least = offer.least()
        assert any(i == first for i, _ in offer.picks(least))
        assert all(i != first for k in range(least) for i, _ in offer.picks(k))


def test_least_work_goes_first_and_last_prompt_is_chunked() -> None:
    prompts = [make_prompt(20_000), make_prompt(100), make_prompt(5000)]
    offer = Offer(COST, prompts, chunk=CHUNK)
    picks = offer.picks(len(LADDER) - 1)
    assert [i for i, _ in picks] == [1, 2, 0]
    assert [n for _, n in picks[:2]] == [100, 5000]
    assert picks[2].tokens == CHUNK - 5100


def test_first_prompt_leaves_half_of_budget_to_short_requests() -> None:
    prompts = [make_prompt(50_000), *[make_prompt(100)] * 8]
    offer = Offer(COST, prompts, chunk=CHUNK, first=0)
    for k in (4, 8):
        picks = dict(offer.picks(k))
        own = COST.token * picks[0] + COST.attention_s(picks[0], 0)
        assert own >= 0.45 * LADDER[k]
        assert len(picks) == 9


def test_history_is_not_unpacked_for_few_tokens() -> None:
    prompts = [make_prompt(4000, 60_000)]
    offer = Offer(COST, prompts, chunk=CHUNK)
    unpack = 4.4e-6 * 60_000
    for k, budget in enumerate(LADDER[:-1]):
        assert bool(offer.picks(k)) == (budget > 2 * unpack * 0.999), k


def test_offer_is_empty_without_token_budget() -> None:
    assert not any(level.tokens for level in Offer(COST, [make_prompt(100)], chunk=0).levels)


@settings(deadline=None, max_examples=20)
@given(
    levels=st.lists(st.builds(Level, WHOLE, WHOLE, WHOLE, WHOLE), min_size=len(LADDER), max_size=len(LADDER)),
    waits=st.builds(Waits, WHOLE, WHOLE, WHOLE, WHOLE, WHOLE),
    terms=st.builds(Terms, WHOLE, WHOLE, WHOLE, WHOLE),
    ran=st.builds(OwnShape, WHOLE, WHOLE, WHOLE, WHOLE),
)
def test_menu_round_trips_as_integers(levels: list[Level], waits: Waits, terms: Terms, ran: OwnShape) -> None:
    menu = Menu(tuple(levels), waits, terms, ran)
    row = menu.row()
    assert len(row) == ROW
    assert Menu.read(row) == menu
    with pytest.raises(ValueError, match="ranks"):
        Menu.read(row[1:])


def test_padded_experts_increase_lone_time() -> None:
    padded = replace(COST, padded=True)
    assert padded.lone_s(8000, 0, CHUNK) > COST.lone_s(8000, 0, CHUNK)
