"""A device that computes while it reads its weights takes the larger of the two times: in the model, its fit and the
simulator."""

from __future__ import annotations

import random

import pytest
from laps_core.latency.fitting import fit
from laps_core.latency.model import LatencyModel
from laps_core.latency.step import Coefficients, StepSample, StepShape
from laps_core.policy.predict import Sizes
from laps_core.policy.types import Waiting
from laps_plan.profile import Profile
from laps_plan.sim.device import Device
from laps_plan.sim.metrics import lone_s
from laps_plan.sim.request import Batch, Request

BENT = Coefficients(alpha=5e-10, linear=8e-5, gamma_r=1e-9, per_request=5e-5, fixed=2e-3, flat=192)
ADDED = Coefficients(alpha=5e-10, linear=8e-5, gamma_r=1e-9, per_request=5e-5, fixed=2e-3)


def steps(device: Coefficients, n: int = 400, noise: float = 0.03) -> list[StepSample]:
    rng = random.Random(1)
    found = []
    for _ in range(n):
        batch = [(round(2 ** rng.uniform(0, 12)), rng.choice((0, 0, 2048))) for _ in range(rng.choice((1, 1, 2, 6)))]
        found.append(StepSample.of(batch, device.seconds(StepShape.of(batch)) * rng.lognormvariate(0.0, noise)))
    return found


def test_step_time_is_constant_below_flat_and_linear_above() -> None:
    one, same = (BENT.seconds(StepShape(0, tokens, 0, 1)) for tokens in (1, 192))
    assert one == same
    assert BENT.seconds(StepShape(0, 384, 0, 1)) - same == pytest.approx(192 * 8e-5)
    assert BENT.step_s == pytest.approx(2e-3 + 192 * 8e-5)


def test_fit_detects_whether_device_has_flat_part() -> None:
    assert fit(steps(ADDED)).flat == 0
    found = fit(steps(BENT))
    assert 128 <= found.flat <= 256
    assert found.step_s == pytest.approx(BENT.step_s, rel=0.1)


def test_outlier_steps_do_not_add_flat_part_to_fit() -> None:
    rng = random.Random(2)
    wild = [s._replace(seconds=s.seconds * (5.0 if rng.random() < 0.03 else 1.0)) for s in steps(ADDED)]
    assert fit(wild).flat == 0


def test_boundary_balances_token_work_and_overhead() -> None:
    # alpha L^2 + linear L = the step's own time and the request's.
    edge = BENT.boundary()
    assert BENT.alpha * edge**2 + BENT.linear * edge == pytest.approx(BENT.step_s + BENT.per_request)


def test_saved_model_keeps_flat() -> None:
    model = LatencyModel(BENT)
    assert LatencyModel.from_json(model.to_json(), "here").coefficients == BENT


def test_short_prompt_in_shared_batch_costs_its_tokens() -> None:
    sizes = Sizes(LatencyModel(BENT), chunk_tokens=8192, unit=1, layers=0, slice_s=0.004)
    assert sizes.beside_s(Waiting(100, 0, 0.0)) == pytest.approx(100 * 8e-5 + 100**2 * 5e-10)
    assert sizes.beside_s(Waiting(1000, 0, 0.0)) == pytest.approx(1000 * 8e-5 + 1000**2 * 5e-10)


@pytest.mark.parametrize("tokens", [1, 100, 192, 500, 8192, 8200, 20000])
def test_simulated_device_matches_latency_model(tokens: int) -> None:
    profile = Profile(name="", source="", coefficients=BENT, poll_s=0.0)
    device, left, history, took = Device(profile), tokens, 0, 0.0
    while left:
        new = min(left, 8192)
        part = device.seconds(Batch([(Request(0, 0.0, new), new, history)], []))
        assert part == pytest.approx(BENT.seconds(StepShape.of([(new, history)])))
        took, left, history = took + part, left - new, history + new
    assert float(lone_s(profile, tokens, 0, 8192)) == pytest.approx(took)
