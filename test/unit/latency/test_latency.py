"""The latency model: recovered coefficients, refused steps, and its status."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from laps_core.config import ConfigError
from laps_core.latency.boundary import Threshold, knee
from laps_core.latency.model import LatencyModel
from laps_core.latency.step import Coefficients, StepSample, StepShape
from sglang_laps import saved_model

TRUE = Coefficients(alpha=2e-8, linear=4e-5, gamma_r=4e-6, per_request=2e-3, fixed=6e-3)
Reqs = list[tuple[int, int]]


def traffic(rng: random.Random, n: int) -> list[Reqs]:
    def one() -> tuple[int, int]:
        history = int(2 ** rng.uniform(4, 12)) if rng.random() < 0.5 else 0
        return int(2 ** rng.uniform(3, 11.5)), history

    return [[one() for _ in range(rng.choice([1, 1, 2, 4, 8]))] for _ in range(n)]


def measure_steps(seed: int, n: int, noise: float, hiccups: float = 0.0) -> list[StepSample]:
    rng = random.Random(seed)

    def seconds(requests: Reqs) -> float:
        stretch = 6.0 if rng.random() < hiccups else 1.0
        return TRUE.seconds(StepShape.of(requests)) * rng.lognormvariate(0.0, noise) * stretch

    return [StepSample.of(r, seconds(r)) for r in traffic(rng, n)]


def fit_model(samples: Iterable[StepSample]) -> LatencyModel:
    """Return a model fitted to all samples."""
    model = LatencyModel()
    for sample in samples:
        model.observe(sample)
    model.fit()
    return model


def test_request_adds_its_work_to_step_time() -> None:
    device = Coefficients(alpha=1 / 64, linear=1 / 2, gamma_r=1 / 16, per_request=3.0, fixed=100.0)
    assert device.work_s(4, 2) == 4 * 8 / 64 + 4 / 2 + 2 / 16 + 3.0
    alone, both = (device.seconds(StepShape.of(those)) for those in ([(5, 7)], [(5, 7), (4, 2)]))
    assert both - alone == device.work_s(4, 2)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("hiccups", [0.0, 0.03])
def test_fit_recovers_coefficients_within_five_percent(seed: int, hiccups: float) -> None:
    model = fit_model(measure_steps(seed, 2000, 0.015, hiccups))
    found = model.coefficients
    assert found is not None
    for name in ("alpha", "linear", "gamma_r", "per_request", "fixed"):
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=0.05), name
    error = model.error()
    assert error is not None
    assert error["median"] < 0.03
    assert hiccups or error["p90"] < 0.05


def test_error_on_noisy_steps_stays_within_limits() -> None:
    model = LatencyModel()
    for sample in measure_steps(7, 800, 0.1, hiccups=0.02):
        model.observe(sample)
    error = model.error()
    assert error is not None
    assert 0.05 <= error["median"] <= 0.10, "half of all times are within 0.067 of the middle"
    assert error["p90"] <= 0.25


def test_model_fits_single_requests_without_history() -> None:
    rng = random.Random(0)
    shapes = [[(int(2 ** rng.uniform(3, 11)), 0)] for _ in range(200)]
    model = fit_model(StepSample.of(r, TRUE.seconds(StepShape.of(r))) for r in shapes)
    assert model.predict([(700, 0)]) == pytest.approx(TRUE.seconds(StepShape.of([(700, 0)])), rel=0.01)


@pytest.mark.parametrize(
    ("requests", "n", "why"),
    [
        ([[(100, 0)]], 500, "too alike"),
        ([[(100, 0)], [(110, 0)], [(120, 0)], [(130, 0)]], 500, "too alike"),
        ([[(10, 0)], [(100, 0)], [(1000, 0)]], 20, "too few"),
    ],
)
def test_degenerate_steps_give_no_fit_and_reason(requests: list[Reqs], n: int, why: str) -> None:
    model = LatencyModel()
    for i in range(n):
        model.observe(StepSample.of(requests[i % len(requests)], 0.01))
    assert not model.fitted
    assert model.predict([(10, 0)]) is None
    assert model.boundary() is None
    assert model.error() is None
    assert why in model.status()["why_not"]


def test_invalid_steps_are_ignored() -> None:
    model = LatencyModel()
    for seconds in (0.0, -1.0, math.nan, math.inf):
        model.observe(StepSample.of([(10, 0)], seconds))
    model.observe(StepSample.of([], 1.0))
    assert model.status()["observed"] == 0


def test_rare_large_steps_survive_many_small_ones() -> None:
    model = LatencyModel()
    large = [[(4000 + 100 * i, 0)] for i in range(12)]
    for r in large:
        model.observe(StepSample.of(r, TRUE.seconds(StepShape.of(r))))
    rng = random.Random(1)
    for _ in range(20_000):
        r = [(rng.randint(8, 200), 0)]
        model.observe(StepSample.of(r, TRUE.seconds(StepShape.of(r)) * rng.lognormvariate(0, 0.05)))
    assert model.status()["samples"] < 500
    assert model.predict([(4500, 0)]) == pytest.approx(TRUE.seconds(StepShape.of([(4500, 0)])), rel=0.1)


def test_model_adapts_to_slower_device() -> None:
    model = LatencyModel()
    samples = measure_steps(3, 3000, 0.02)
    for s in samples[:1500]:
        model.observe(s)
    for s in samples[1500:]:
        model.observe(StepSample(s.shape, 2 * s.seconds))
    assert model.predict([(500, 0)]) == pytest.approx(2 * TRUE.seconds(StepShape.of([(500, 0)])), rel=0.1)


def test_number_of_refits_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    model = LatencyModel()
    fits: list[int] = []
    original = model.fit

    def fit() -> None:
        fits.append(1)
        original()

    monkeypatch.setattr(model, "fit", fit)
    for s in measure_steps(0, 5000, 0.02):
        model.observe(s)
    assert len(fits) <= 25


# -- boundaries


@given(st.floats(0, 1e-6), st.floats(1e-7, 1e-3), st.floats(1e-4, 1.0))
def test_knee_is_where_token_work_equals_fixed_cost(alpha: float, linear: float, fixed: float) -> None:
    tokens = knee(alpha, linear, fixed)
    assert alpha * tokens * tokens + linear * tokens == pytest.approx(fixed)


def test_knee_handles_missing_terms() -> None:
    assert knee(0.0, 0.0, 1.0) == math.inf
    assert knee(0.0, 2.0, 1.0) == 0.5
    assert knee(4.0, 0.0, 1.0) == 0.5
    assert knee(4.0, 0.0, 0.0) == 0.0


def test_boundary_is_knee_of_fitted_model() -> None:
    model = fit_model(measure_steps(0, 600, 0.01))
    assert model.boundary() == pytest.approx(knee(2e-8, 4e-5, 8e-3), rel=0.05)


def test_auto_threshold_is_clamped_rate_limited_and_stable() -> None:
    auto = Threshold(None)

    def at(now: float, boundary: float | None) -> int:
        auto.update(now, lambda: boundary)
        return auto.tokens

    assert at(0.0, None) == 256
    assert auto.source == "default"
    assert at(1.0, 500.0) == 500
    assert at(5.0, 900.0) == 500, "within the period"
    assert at(11.5, 560.0) == 500, "within the hysteresis"
    assert at(22.0, 600.0) == 600
    assert at(32.0, math.inf) == 1024, "the period is over"
    assert at(42.0, 1.0) == 64
    assert auto.source == "knee"


# -- saved models


def test_saved_model_predicts_equally_and_keeps_learning(tmp_path: Path) -> None:
    model = fit_model(measure_steps(0, 600, 0.02))
    path = str(tmp_path / "h100.json")
    saved_model.save(model, path)
    again = saved_model.load(path)
    assert again.predict([(300, 50)]) == model.predict([(300, 50)])
    assert again.error() == model.error()
    assert again.boundary() == model.boundary()
    for s in measure_steps(1, 200, 0.02):
        again.observe(s)
    assert again.predict([(300, 50)]) == pytest.approx(model.predict([(300, 50)]), rel=0.1)


SAVED = '{"kind": "laps-latency", "version": 1, "coefficients": null, "samples": [%s], "held_out": []}'


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON|recursion"),
        ("[]", "not a saved latency model"),
        ("{}", "not a saved latency model"),
        ('{"kind": "laps-latency", "version": 2}', "version 2, this release reads 1"),
        ('{"kind": "laps-latency", "version": 1}', "damaged"),
        ('{"kind": "laps-latency", "version": 1, "coefficients": {"alpha": 1}}', "damaged"),
        ('{"kind": "laps-latency", "version": 1, "coefficients": null, "samples": [[1, 2]]}', "damaged"),
        ('{"kind": "laps-latency", "version": 1, "coefficients": null, "samples": 7}', "damaged"),
        (SAVED % "[1, 2, 3, 1, 0.0]", "damaged"),
        (SAVED % "[1, -2, 3, 1, 0.5]", "damaged"),
        (SAVED % "[1, 2, 3, 1, 1e999]", "not JSON|damaged"),
        (SAVED % "[1, 2, 3, 1, NaN]", "not JSON"),
        (SAVED % "[1, 2, 3, true, 0.5]", "damaged"),
    ],
)
@pytest.mark.parametrize("name", ["m.json", "m"])
def test_invalid_model_file_is_rejected_in_one_line(tmp_path: Path, name: str, text: str, why: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError, match=why) as e:
        saved_model.load(str(path))
    assert "\n" not in str(e.value)
    assert "profile: " in str(e.value)


def test_negative_coefficient_and_missing_folder_are_rejected(tmp_path: Path) -> None:
    model = fit_model(measure_steps(0, 600, 0.02))
    body = json.loads(model.to_json())
    body["coefficients"]["fixed"] = -1.0
    with pytest.raises(ConfigError, match=r">= 0.0 - at `\$.coefficients.fixed`"):
        LatencyModel.from_json(json.dumps(body), "here")
    assert not saved_model.load(str(tmp_path / "none.json")).fitted, "it will be written there"
    for name in ("h200-qwen3-8bb", "model"):
        with pytest.raises(ConfigError, match=r"no such profile; known: .*h200-qwen3-8b, .*; a new file") as e:
            saved_model.load(name)
        assert "\n" not in str(e.value)
    with pytest.raises(ConfigError, match="no such folder"):
        saved_model.load(str(tmp_path / "none" / "none.json"))
    with pytest.raises(ConfigError, match="Is a directory"):
        saved_model.load(str(tmp_path))


def test_model_status_is_json_with_fit_results() -> None:
    model = LatencyModel()
    assert json.loads(json.dumps(model.status()))["fitted"] is False
    model = fit_model(measure_steps(0, 600, 0.02))
    status = json.loads(json.dumps(model.status()))
    assert status["fitted"]
    assert status["why_not"] is None
    assert status["boundary_source"] == "knee"
    assert status["error"]["samples"] == 120


def test_one_fifth_of_steps_is_held_out_of_fit() -> None:
    model = LatencyModel()
    for s in measure_steps(0, 100, 0.02):
        model.observe(s)
    kept = json.loads(model.to_json())
    assert (len(kept["samples"]), len(kept["held_out"])) == (80, 20)


def test_failed_save_leaves_saved_model_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.json"
    model = LatencyModel()
    saved_model.save(model, str(path))
    before = path.read_text()

    def full_disk() -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(model, "to_json", full_disk)
    with pytest.raises(OSError, match="No space"):
        saved_model.save(model, str(path))
    assert path.read_text() == before
    assert list(tmp_path.iterdir()) == [path]
