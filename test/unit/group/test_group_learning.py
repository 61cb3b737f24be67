"""Learning of a group's cost terms from measured steps."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace

import pytest
from groups import COST
from laps_core.group.cost import GroupCost, OwnShape
from laps_core.group.learning import GroupModel, GroupSample, learn_latest, proportions
from laps_core.latency.fits import Learned
from laps_core.latency.strata import PER_STRATUM, STRATA, Strata

GUESS = GroupCost(ranks=4, fixed=0.1, token=1e-4, alpha=1e-9, expert=1e-6, absorbed=1e-8)


def steps(n: int, cost: GroupCost = COST, noise: float = 0.02, seed: int = 1) -> list[GroupSample]:
    rng, found = random.Random(seed), []
    for _ in range(n):
        shapes = []
        for _ in range(cost.ranks):
            batch = [(rng.randint(1, 400), rng.choice((0, 0, 2000))) for _ in range(rng.randint(0, 6))]
            if rng.random() < 0.5:
                batch.append((rng.randint(400, 6000), rng.choice((0, 0, 20_000, 90_000))))
            shapes.append(cost.shape(batch))
        if any(s.tokens for s in shapes):
            found.append(GroupSample(tuple(shapes), cost.seconds(shapes) * rng.gauss(1.0, noise)))
    return found


@pytest.mark.parametrize("padded", [False, True])
def test_own_and_expert_terms_are_learned_separately(padded: bool) -> None:
    true = replace(COST, padded=padded)
    model = GroupModel(replace(GUESS, padded=padded))
    for sample in steps(400, true):
        model.observe(sample)
    assert model.fitted
    found = model.cost
    assert found.token == pytest.approx(true.token, rel=0.15)
    assert found.expert == pytest.approx(true.expert, rel=0.15)
    assert found.alpha == pytest.approx(true.alpha, rel=0.3)
    assert found.unpack == pytest.approx(true.unpack, rel=0.15)
    off = sorted(abs(found.seconds(s.shapes) / true.seconds(s.shapes) - 1.0) for s in steps(200, true, 0.0, seed=2))
    assert off[len(off) // 2] < 0.05
    assert off[int(0.9 * len(off))] < 0.1


def test_fit_tolerates_ten_percent_stretched_steps() -> None:
    model, rng = GroupModel(GUESS), random.Random(3)
    for sample in steps(400):
        model.observe(sample._replace(seconds=sample.seconds * (3.0 if rng.random() < 0.1 else 1.0)))
    off = sorted(
        abs(model.cost.seconds(s.shapes) / COST.seconds(s.shapes) - 1.0) for s in steps(200, noise=0.0, seed=4)
    )
    assert off[len(off) // 2] < 0.05


@pytest.mark.parametrize("times", [0.5, 3.0])
def test_model_forgets_steps_of_other_speed(times: float) -> None:
    model, now = GroupModel(GUESS), COST.stretched(times)
    for sample in steps(1500):
        model.observe(sample)
    for sample in steps(900, now, seed=5):
        model.observe(sample)
    documents = [COST.shape([(tokens, 90_000)]) for tokens in (300, 6000)]
    for first in documents:  # seldom seen since the change
        shapes = (first, *[OwnShape(0, 0, 0, 0)] * (COST.ranks - 1))
        assert model.cost.seconds(shapes) == pytest.approx(now.seconds(shapes), rel=0.1)


@pytest.mark.parametrize("seed", range(3))
def test_noise_outdates_no_steps(seed: int) -> None:
    samples = [s._replace(number=i + 1) for i, s in enumerate(steps(1000, noise=0.15, seed=seed))]
    for newest in (300, 600, 1000):
        assert learn_latest(samples[:newest], COST, (), newest).outdated is None


def test_invalid_samples_are_ignored() -> None:
    model = GroupModel(GUESS)
    shapes = steps(1)[0].shapes
    for seconds in (0.0, -1.0, math.inf, math.nan):
        model.observe(GroupSample(shapes, seconds))
    model.observe(GroupSample(shapes[:2], 0.1))
    model.observe(GroupSample((OwnShape(0, 0, 0, 0),) * 4, 0.1))
    model.observe(GroupSample((OwnShape(-5, 0, 0, 0), *shapes[1:]), 0.1))
    assert model.observed == 0


def test_identical_steps_give_no_fit() -> None:
    model = GroupModel(GUESS)
    for sample in steps(1) * 100:
        model.observe(sample)
    assert model.observed == 100
    assert not model.fitted
    assert model.cost == GUESS


def test_first_steps_scale_guess_and_fit_replaces_guess() -> None:
    """The proportions of the terms are wrong, but predictions are right on average at once."""
    true = replace(COST.stretched(20.0), absorbed=None)
    model = GroupModel(proportions(true.ranks), guess=True)
    ready = []
    for sample in steps(31, true):
        model.observe(sample)
        ready.append(model.ready)
    assert ready == [False] * 3 + [True] * 28
    assert not model.fitted

    def off() -> float:
        return statistics.median(abs(model.cost.seconds(s.shapes) / s.seconds - 1.0) for s in steps(200, true, 0.0, 2))

    stretched = off()
    assert stretched < 0.5
    for sample in steps(60, true, seed=3):
        model.observe(sample)
    assert model.fitted
    assert off() < min(0.1, stretched)


def test_indistinguishable_terms_keep_their_proportions() -> None:
    """With one request at a time on one rank, own part and experts cannot be distinguished."""
    true, rng = replace(COST.stretched(3.0), absorbed=None), random.Random(5)
    model = GroupModel(replace(COST, absorbed=None), guess=True)
    for _ in range(120):
        batch = true.shape([(rng.choice((500, 2000, 4000, 8000)), 0)])
        shapes = (batch, *[OwnShape(0, 0, 0, 0)] * (true.ranks - 1))
        model.observe(GroupSample(shapes, true.seconds(shapes) * rng.gauss(1.0, 0.02)))
    assert model.fitted
    assert model.cost.expert == pytest.approx(true.expert, rel=0.3)
    everywhere = [true.shape([(2000, 0)])] * true.ranks
    assert model.cost.seconds(everywhere) == pytest.approx(true.seconds(everywhere), rel=0.1)


def test_number_of_kept_steps_is_bounded() -> None:
    kept: Strata[int] = Strata()
    for i in range(10_000):
        kept.add(i % 200, i)
    assert len(kept.samples()) <= PER_STRATUM * STRATA
    assert max(kept.samples()) == 9999


def test_background_fit_is_adopted_when_done() -> None:
    asked, later, model = [], Future[Learned[GroupCost | None]](), GroupModel(GUESS)

    def submit(
        learn: object, samples: Sequence[GroupSample], cost: GroupCost, *rest: object
    ) -> Future[Learned[GroupCost | None]]:
        asked.append((len(samples), cost))
        return later

    model.submit = submit
    for sample in steps(400):
        model.observe(sample)
    assert asked == [(32, GUESS)], "one at a time"
    assert not model.fitted
    later.set_result(Learned(COST))
    model.settle()
    assert model.fitted
    assert model.cost is COST
