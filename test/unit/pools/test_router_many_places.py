"""Many servers with many ranks: the fast choice equals that of a check of every place."""

from __future__ import annotations

import random

import pytest
from choosing import choose_and_record
from hypothesis import given, settings
from hypothesis import strategies as st
from laps_core.latency.step import Coefficients
from laps_core.pools import choice as choice_module
from laps_core.pools.choice import Choice, Pools
from laps_core.pools.config import AllocConfig
from laps_core.pools.offers import BEHIND, Offer
from laps_core.pools.prefixes import Ask, fingerprint
from laps_core.pools.pressure import BOTH

MODEL = Coefficients(alpha=1e-9, linear=1.2e-5, gamma_r=1e-9, per_request=1e-4, fixed=4e-3)


def each(usable: list, ask: Ask, now: float, threshold: int) -> tuple[list[Offer], list[Offer]]:  # type: ignore[type-arg]
    """Return the offers of all places, by the straightforward rule."""
    total = max(1, ask.total)
    own: list[Offer] = []
    others: list[Offer] = []
    for i in usable:
        for place in i.places:
            new = ask.new(place.prefixes)
            short = new <= threshold
            at_home = i.pool == BOTH or (i.pool == "short") == short or (short and total > threshold)
            work_s = place.outlook.model.work_s(new, total - new)
            first_s, delay_s = place.outlook.costs_s(now, place.outlook.model.step_s, work_s, short)
            others_s = delay_s + BEHIND * work_s
            offer = first_s + others_s, new, place, others_s
            (own if at_home else others).append(offer)
    return own, others


def fleet(seed: int, n: int, ranks: int) -> Pools:
    rng = random.Random(seed)
    config = AllocConfig(initial_short=n // 3 if rng.random() < 0.5 and n >= 3 else None, spill="both", load_unit=2000)
    pools = Pools([(f"http://p{i}", 1) for i in range(n)], config, clock=lambda: 100.0)
    for i in pools.instances:
        i.set_rank_count(ranks)
        i.set_capabilities(rng.random() < 0.5, MODEL if rng.random() < 0.7 else None, None)
        for place in i.places:
            if rng.random() < 0.3:
                place.outlook.record_work(99.0 + rng.random(), rng.random() * 0.1, rng.random() * 2.0)
    return pools


def said(choice: Choice | None) -> tuple[object, ...] | None:
    if choice is None:
        return None
    rank = choice.rank.number if choice.rank else 0
    return (
        choice.instance.url,
        rank,
        choice.length_class,
        choice.new_tokens,
        choice.why == "spill",
        choice.why == "copy",
    )


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32), n=st.integers(1, 12), ranks=st.integers(1, 4))
def test_fast_choice_equals_exhaustive_check(seed: int, n: int, ranks: int) -> None:
    rng = random.Random(seed)
    both, leases = (fleet(seed, n, ranks), fleet(seed, n, ranks)), []
    texts = [bytes([65 + i]) * 256 * rng.randint(1, 12) for i in range(6)]
    for turn in range(40):
        prompts = [rng.choice(texts) + bytes([97 + turn % 26]) * 300 for _ in range(rng.choice((0, 1, 1, 1, 3)))]
        tokens, slo_s = rng.choice((10, 200, 300, 5000, 40_000)), rng.choice((None, None, 0.5))
        found = []
        for k, pools in enumerate(both):
            ask = Ask(tokens, [fingerprint(p) for p in prompts], slo_s=slo_s)
            with pytest.MonkeyPatch.context() as patch:
                if k:
                    patch.setattr(choice_module, "list_offers", each)
                found.append(choose_and_record(pools, ask))
        assert said(found[0]) == said(found[1])
        made = [choice.lease().__enter__() for choice in found if choice]
        leases.append(made)
        if rng.random() < 0.5:
            for lease in leases.pop(rng.randrange(len(leases))):
                lease.end()
