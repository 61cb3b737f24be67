"""Profiles from measured kernels: the grid, the fit, the packaged files, the command."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from laps_core.latency import fitting
from laps_core.latency.step import Coefficients, StepSample, StepShape
from laps_plan.kernels import command, fit, grid
from laps_plan.profile import Profile

TRUE = Coefficients(alpha=5e-10, linear=2e-5, gamma_r=2e-9, per_request=1e-5, fixed=5e-3)


def kernels(new: int, old: int, n: int) -> dict[str, float]:
    """Return the kernel times of a device with known coefficients."""
    return {
        "context_attention": n * (TRUE.alpha * new * (new + 2 * old) + TRUE.gamma_r * old),
        "context_logits_gemm": n * TRUE.per_request,
        "context_qkv_gemm": TRUE.linear * new * n,
        "context_add_norm": TRUE.fixed,
    }


def test_fit_recovers_additive_device() -> None:
    rows = grid.samples(kernels)
    found = fitting.fit(rows)
    assert fit.errors(found, rows)["worst"] < 0.01
    assert found.fixed == pytest.approx(TRUE.fixed, rel=0.01)


def test_mixed_batch_costs_sum_of_its_requests() -> None:
    batch = [(4096, 8192), (64, 0), (64, 0)]
    assert grid.seconds(batch, kernels) == pytest.approx(TRUE.seconds(StepShape.of(batch)), rel=1e-3)


def test_grid_covers_batches_histories_and_mixtures() -> None:
    shapes = [StepShape.of(batch) for batch in grid.batches()]
    assert max(s.tokens for s in shapes) == grid.LONGEST
    assert any(s.requests > 1 for s in shapes)
    assert max(s.history for s in shapes) >= 32768
    assert any(len(set(batch)) > 2 for batch in grid.batches())


def test_profile_records_host_times_and_slow_launches() -> None:
    rows = grid.samples(kernels)
    made = fit.profile("x", "here", 36, rows, {})
    assert made.details["assumed"]["reply_s"] == made.reply_s
    slow = fit.profile("x", "here", 36, rows, {}, fit.Host(breakable_layer_s=1e-3))
    assert slow.coefficients.step_s == pytest.approx(36e-3)
    assert slow.launch_s > made.launch_s


@pytest.mark.parametrize(("system", "model", "tp"), command.KEPT)
def test_packaged_profiles_fit_their_grid(system: str, model: str, tp: int) -> None:
    kept = Profile.load(command.profile_name(system, model, tp))
    rows = [StepSample(StepShape(*map(int, shape)), seconds) for *shape, seconds in kept.details["grid"]]
    off = fit.errors(Coefficients(**kept.details["kernels"]), rows)
    assert off["median"] <= fit.MEDIAN
    assert off["p90"] <= fit.P90
    assert "AIConfigurator 0.12.0" in kept.source
    assert "assumed" in kept.source


def test_profile_names_are_short() -> None:
    assert command.profile_name("h200_sxm", "Qwen/Qwen3-30B-A3B", 2) == "h200-qwen3-30b-a3b-tp2"
    assert command.profile_name("h100_sxm", "/some/where/My Model", 1) == "h100-my-model"


def test_missing_aiconfigurator_prints_install_hint(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "aiconfigurator", None)
    assert command.main(["--out", str(tmp_path)]) == 1
    assert "pip install 'sglang-laps[profile]'" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
