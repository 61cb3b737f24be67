"""Saving of the latency model to a file as it learns."""

from __future__ import annotations

from pathlib import Path

import pytest
from laps_core.config import ConfigError
from laps_core.latency.model import LatencyModel
from laps_core.latency.step import StepSample
from laps_plan.profile import Profile
from sglang_laps.saved_model import PERIOD_S, Saver, load


def fit_model() -> LatencyModel:
    """Return a model fitted to steps that take 1 ms plus 0.1 ms per token."""
    model = LatencyModel()
    for i in range(40):
        tokens = 20 + 40 * (i % 12)
        model.observe(StepSample.of([(tokens, 0)], 1e-3 + 1e-4 * tokens))
    assert model.fitted
    return model


@pytest.mark.parametrize("uptime", [4.2, 1e6])
def test_model_is_saved_at_first_call_then_periodically(tmp_path: Path, uptime: float) -> None:
    path = tmp_path / "model.json"
    model = fit_model()
    saver = Saver(model, str(path))
    saver.when_due(uptime)
    assert load(str(path)).predict([(100, 0)]) == model.predict([(100, 0)])
    path.unlink()
    saver.when_due(uptime + 2 * PERIOD_S)
    assert not path.exists(), "nothing was learnt since"
    model.observe(StepSample.of([(50, 0)], 0.01))
    saver.when_due(uptime + PERIOD_S - 1.0)
    assert not path.exists()
    saver.when_due(uptime + PERIOD_S)
    assert path.exists()


def test_nothing_is_saved_without_path_or_fitted_model(tmp_path: Path) -> None:
    Saver(fit_model(), None).when_due(1.0)
    Saver(LatencyModel(), str(tmp_path / "model.json")).when_due(1.0)
    assert list(tmp_path.iterdir()) == []


def test_missing_folder_logs_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Saver(fit_model(), str(tmp_path / "none" / "model.json")).when_due(1.0)
    assert "No such file" in caplog.text


def test_learning_starts_from_profile_without_overwriting_file(tmp_path: Path) -> None:
    known = Profile.load("h200-qwen3-8b")
    assert load("h200-qwen3-8b").coefficients == known.coefficients
    path = tmp_path / "mine.json"
    known.save(path)
    before = path.read_bytes()
    model = load(str(path))
    for _ in range(40):
        model.observe(StepSample.of([(50, 0)], 0.01))
    Saver(model, str(path)).when_due(1e6)
    assert path.read_bytes() == before


def test_empty_file_is_no_reason_to_refuse_to_start(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    path.touch()
    assert not load(str(path)).fitted


def test_damaged_profile_gives_one_line_error(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    Profile.load("h200-qwen3-8b").save(path)
    path.write_text(path.read_text().replace('"alpha": ', '"alpha": -'))
    with pytest.raises(ConfigError, match="damaged") as e:
        load(str(path))
    assert "\n" not in str(e.value)
