"""Limits of the latency model: times of fits, kept steps, refused steps."""

from __future__ import annotations

import json

import pytest
from laps_core.config import ConfigError
from laps_core.latency.model import MIN_SAMPLES, LatencyModel
from laps_core.latency.step import StepSample

Reqs = list[tuple[int, int]]


def test_model_is_fitted_after_min_samples() -> None:
    model = LatencyModel()
    for i in range(1, MIN_SAMPLES + 1):
        model.observe(StepSample.of([(10 * i, 0)], 1e-3 + 1e-5 * 10 * i))
        assert model.fitted == (i == MIN_SAMPLES)


def test_model_is_refitted_every_64_steps() -> None:
    model = LatencyModel()
    found: list[tuple[int, float | None]] = []
    for i in range(1, 300):
        tokens = 10 + 10 * (i % 40)
        model.observe(StepSample.of([(tokens, 0)], (1e-3 + 1e-5 * tokens) * (1 + i / 100)))
        if not found or model.predict([(100, 0)]) != found[-1][1]:
            found.append((i, model.predict([(100, 0)])))
    assert [i for i, _ in found[1:]] == [MIN_SAMPLES, MIN_SAMPLES + 64, MIN_SAMPLES + 128, MIN_SAMPLES + 192, 288]


@pytest.mark.parametrize(
    "alike",
    [[[(96, history)] for history in (4, 8, 16, 31)], [[(96 // n, 0)] * n for n in (2, 3, 4, 6)]],
)
def test_model_keeps_newest_32_similar_steps(alike: list[Reqs]) -> None:
    model = LatencyModel()
    for i in range(400):
        model.observe(StepSample.of(alike[i % 4], 0.01 if i < 300 else 0.02))
    assert model.status()["samples"] == 32
    assert {sample[-1] for sample in json.loads(model.to_json())["samples"]} == {0.02}


@pytest.mark.parametrize("lengths", [(10, 100, 1000), (100, 150, 200)])
def test_three_lengths_spanning_factor_two_are_enough_to_fit(lengths: tuple[int, ...]) -> None:
    model = LatencyModel()
    for i in range(60):
        tokens = lengths[i % 3]
        model.observe(StepSample.of([(tokens, 0)], 1e-3 + 1e-5 * tokens))
    assert model.predict([(150, 0)]) == pytest.approx(2.5e-3)


@pytest.mark.parametrize("row", ["[-1, 1, 1, 1, 0.1]", "[1, 1, 1, -1, 0.1]", "[1, 1, 1, 1, 0]"])
def test_from_json_rejects_impossible_sample(row: str) -> None:
    text = '{"kind": "laps-latency", "version": 1, "coefficients": null, "samples": [%s], "held_out": []}'
    assert not LatencyModel.from_json(text % "[1, 1, 1, 1, 0.1]", "x").fitted
    with pytest.raises(ConfigError, match="damaged"):
        LatencyModel.from_json(text % row, "x")


def test_from_json_accepts_zero_but_not_negative_coefficient() -> None:
    text = '{"kind": "laps-latency", "version": 1, "samples": [], "held_out": [], "coefficients": '
    text += '{"alpha": 0, "linear": 1, "gamma_r": 0, "per_request": 0, "fixed": %s}}'
    assert LatencyModel.from_json(text % "0.5", "x").predict([(3, 0)]) == 3.5
    with pytest.raises(ConfigError, match="damaged"):
        LatencyModel.from_json(text % "-0.5", "x")
