"""The latency model on a device that became slower or faster, and on traffic with a rhythm."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import astuple

import pytest
from laps_core.latency.model import LatencyModel
from laps_core.latency.step import Coefficients, StepSample, StepShape

TRUE = Coefficients(alpha=2e-9, linear=2e-5, gamma_r=1e-9, per_request=1e-5, fixed=5e-3)
Draw = Callable[[random.Random], list[tuple[int, int]]]


def slower(times: float) -> Coefficients:
    return Coefficients(*(times * term for term in astuple(TRUE)[:5]))


def wide(rng: random.Random) -> list[tuple[int, int]]:
    if rng.random() < 0.5:
        return [(rng.randint(1, 256), rng.choice([0, 500, 30_000])) for _ in range(rng.choice([1, 2, 4, 8, 16]))]
    return [(int(2 ** rng.uniform(8, 13)), rng.choice([0, 1000, 60_000]))]


def narrow(rng: random.Random) -> list[tuple[int, int]]:
    """Return chat, or a document of one of two sizes."""
    if rng.random() < 0.8:
        return [(rng.randint(20, 60), 0) for _ in range(rng.choice([1, 2]))]
    return [(rng.choice([2048, 4096]), 0)]


def two_shapes(rng: random.Random) -> list[tuple[int, int]]:
    return [(rng.choice([50, 2048]), 0)]


def observe(
    model: LatencyModel, device: Coefficients, draw: Draw, n: int, seed: int = 1, hiccups: float = 0.0
) -> LatencyModel:
    rng = random.Random(seed)
    for _ in range(n):
        shape = StepShape.of(draw(rng))
        stretch = 20.0 if rng.random() < hiccups else 1.0
        model.observe(StepSample(shape, device.seconds(shape) * rng.gauss(1.0, 0.03) * stretch))
    return model


def ratios(model: LatencyModel, device: Coefficients, draw: Draw) -> list[float]:
    """Return predicted over true times, sorted."""
    rng = random.Random(9)
    shapes = [draw(rng) for _ in range(300)]
    return sorted((model.predict(shape) or 0.0) / device.seconds(StepShape.of(shape)) for shape in shapes)


@pytest.mark.parametrize("times", [1.3, 1.5, 2.0, 3.0, 0.5, 0.33])
@pytest.mark.parametrize("saved", [False, True])
def test_model_forgets_steps_of_other_speed(times: float, saved: bool) -> None:
    model = observe(LatencyModel(), TRUE, wide, 6000)
    if saved:
        model = LatencyModel.from_json(model.to_json(), "here")
    observe(model, slower(times), narrow, 3000, seed=2)
    found = ratios(model, slower(times), narrow)
    assert 0.85 < found[0] <= found[-1] < 1.2
    error = model.error()
    assert error is not None
    assert error["median"] < 0.05


@pytest.mark.parametrize("draw", [narrow, two_shapes])
@pytest.mark.parametrize("hiccups", [0.0, 0.05])
def test_outliers_and_few_shapes_leave_older_steps(draw: Draw, hiccups: float) -> None:
    model = observe(LatencyModel(), TRUE, wide, 6000)
    before = model.status()["samples"]
    observe(model, TRUE, draw, 10_000, seed=2, hiccups=hiccups)
    assert model.status()["samples"] >= before
    found = ratios(model, TRUE, wide)
    assert 0.9 < found[0] <= found[-1] < 1.1


@pytest.mark.parametrize("cycle", [4, 5, 10, 25])
def test_rhythm_of_steps_hides_no_kind_from_fit(cycle: int) -> None:
    model, rng = LatencyModel(), random.Random(1)
    for n in range(1, 3001):
        chunk = [(8192, rng.choice([0, 8192]))]
        shape = StepShape.of(chunk if n % cycle == 0 else [(rng.randint(8, 125), 0)])
        model.observe(StepSample(shape, TRUE.seconds(shape) * rng.gauss(1.0, 0.03)))
    assert model.predict([(8192, 0)]) == pytest.approx(TRUE.seconds(StepShape.of([(8192, 0)])), rel=0.1)
