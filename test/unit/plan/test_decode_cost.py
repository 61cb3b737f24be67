"""Cost of decode steps: one read of the weights, every context, within the bandwidth of a device."""

from __future__ import annotations

import pytest
from laps_plan.decode import DecodeCost
from laps_plan.kernels import command, decode, fit
from laps_plan.kernels.decode import DecodeSample
from laps_plan.profile import Profile

BANDWIDTH = {"h200_sxm": 4.8e12, "h100_sxm": 3.35e12}
"""Memory bandwidth by device (bytes per second)."""
WEIGHTS = {"Qwen/Qwen3-8B": (15.1e9, 15.1e9), "Qwen/Qwen3-32B": (64e9, 64e9), "Qwen/Qwen3-30B-A3B": (6e9, 60e9)}
"""Bytes of weights read by a step of one stream, and of very many streams (all experts of a mixture of experts)."""
CONTEXT = {"Qwen/Qwen3-8B": 147_456, "Qwen/Qwen3-32B": 262_144, "Qwen/Qwen3-30B-A3B": 98_304}
"""Bytes of KV cache per token."""
KEPT = pytest.mark.parametrize(("system", "model", "tp"), command.KEPT)


def load_decode_cost(system: str, model: str, tp: int) -> tuple[Profile, DecodeCost]:
    made = Profile.load(command.profile_name(system, model, tp))
    assert made.decode is not None
    return made, made.decode


@KEPT
def test_decode_step_time_is_near_memory_bandwidth_limit(system: str, model: str, tp: int) -> None:
    _, cost = load_decode_cost(system, model, tp)
    bandwidth = tp * BANDWIDTH[system]
    for streams, weights in zip((1, 256), WEIGHTS[model], strict=True):
        assert cost.step_s(streams, 0) > weights / bandwidth
    assert cost.step_s(1, 0) < 3.0 * WEIGHTS[model][0] / bandwidth + 2e-3
    assert 1.0 < cost.context / (CONTEXT[model] / bandwidth) < 1.5


@KEPT
def test_step_time_grows_with_load_but_batching_saves_time(system: str, model: str, tp: int) -> None:
    made, cost = load_decode_cost(system, model, tp)
    known = [cost.step_s(n, 1000 * n) for n in range(1, 400)]
    assert known == sorted(known)
    assert made.decode_s(64, 64_000) < 64 * made.decode_s(1, 1000) / 4
    assert made.stretched(4.0).decode_s(7, 7000) == pytest.approx(4.0 * made.decode_s(7, 7000))


@KEPT
def test_packaged_profiles_fit_their_decode_grid(system: str, model: str, tp: int) -> None:
    made, cost = load_decode_cost(system, model, tp)
    rows = [DecodeSample(int(n), int(tokens), *seconds) for n, tokens, *seconds in made.details["decode_grid"]]
    off = fit.decode_errors(cost, rows)
    assert off["median"] <= fit.MEDIAN
    assert off["p90"] <= fit.P90


def test_decode_cost_recovers_device_terms() -> None:
    def generation(n: int, each: int) -> dict[str, float]:
        return {"generation_attention": 1e-4 + 2e-6 * n + 3e-8 * n * each, "generation_gemm": 5e-3 + 1e-5 * n}

    found = decode.cost(decode.samples(generation))
    assert found.context == pytest.approx(3e-8)
    for n in (1, 3, 100, 256, 400):
        assert found.step_s(n, 500 * n) == pytest.approx(5.1e-3 + 1.2e-5 * n + 3e-8 * 500 * n, rel=1e-3)


def test_step_time_never_falls_with_more_streams() -> None:
    falling = {1: 5e-3, 2: 4e-3}

    def generation(n: int, each: int) -> dict[str, float]:
        return {"generation_attention": 1e-4 + 3e-8 * n * each, "generation_gemm": falling.get(n, 6e-3)}

    found = decode.cost(decode.samples(generation))
    assert found.rows_s(2) == pytest.approx(found.rows_s(1))


def test_decode_time_of_profile_without_decode_steps_raises_error() -> None:
    with pytest.raises(ValueError, match="does not say how long decode steps take"):
        Profile.load("cpu").decode_s(1, 1)
