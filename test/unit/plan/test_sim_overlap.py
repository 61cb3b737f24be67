"""The simulated overlap loop decides a batch while another one runs, and processes results a step later."""

from __future__ import annotations

from dataclasses import replace

import pytest
from laps_core.latency.step import Coefficients
from laps_plan.profile import Profile
from laps_plan.sim.variants import run
from laps_plan.traffic.job import Job
from laps_plan.traffic.streams import Closed, Open, Trace
from simulated import CHUNK, HOST_PROFILE, MIX, WAYS

# A step takes 10 ms plus 0.1 ms per token; the host 3 ms from decision to step, 1 ms from result to decision.
STEPS = Profile(
    name="steps", source="made up", coefficients=Coefficients(0.0, 1e-4, 0.0, 0.0, 0.01), step_host_s=3e-3,
    poll_s=1e-3, layers=10, ahead=True,
)  # fmt: skip


def ttft_ms(jobs: list[Job], name: str = "fcfs", profile: Profile = STEPS, **how: object) -> list[float]:
    """Return the TTFT of each job (ms), in order of arrival."""
    record = run(name, Trace(jobs), profile, chunk=1000, overlap=True, **how).record  # type: ignore[arg-type]
    return [round(1e3 * t, 1) for _, t in sorted(zip(record.at, record.ttft, strict=True))]


@pytest.mark.parametrize("name", ["fcfs", "hrrn", "shortest-prefill-first", "dual", "laps"])
@pytest.mark.parametrize("ahead", [False, True])
def test_every_request_is_answered_once(name: str, ahead: bool) -> None:
    profile = replace(HOST_PROFILE, ahead=ahead, launch_s=2e-3, slices_launch_s=8e-3, layers=20)
    for workload in (Open(MIX, 30.0, 1000, seed=3), Closed(MIX, 16, 600, seed=4)):
        policy, knobs = WAYS[name]
        outcome = run(policy, workload, profile, chunk=CHUNK, knobs=knobs, overlap=True)
        assert len(outcome.record) == outcome.sent
        assert outcome.busy_s[0] <= outcome.seconds


def test_overlap_adds_no_time_to_lone_request() -> None:
    assert ttft_ms([Job(0.0, 100)]) == [23.0]


def test_host_time_between_steps_is_hidden() -> None:
    jobs = [Job(0.0, 3000)]
    assert ttft_ms(jobs) == [3.0 + 3 * 110.0], "three chunks"
    without = run("fcfs", Trace(jobs), STEPS, chunk=1000).record.ttft[0]
    assert 1e3 * without == pytest.approx(3 * (3.0 + 110.0) + 2 * 1.0)


def test_arrival_during_host_wait_is_seen_after_step() -> None:
    # The second arrives early and is launched behind the first; the third while the host waits for the first.
    jobs = [Job(0.0, 100), Job(0.0035, 100), Job(0.010, 100)]
    # First: 3 to 23. Second: decided at 4, runs 23 to 43. Third: seen at 24, launched at 27, runs 43 to 63.
    assert ttft_ms(jobs) == [23.0, 43.0 - 3.5, 63.0 - 10.0]
    # Without a batch behind the first, the device waits until the host has seen the first's result.
    assert ttft_ms([Job(0.0, 100), Job(0.010, 100)]) == [23.0, 23.0 + 1.0 + 3.0 + 20.0 - 10.0]


def test_slow_launch_delays_result_of_previous_step() -> None:
    profile = replace(STEPS, launch_s=0.015)
    # First: launched at 18. Second: decided at 19, launched at 37. Only then the first's result (of 23) is seen.
    assert ttft_ms([Job(0.0, 100), Job(0.0035, 100)], profile=profile) == [37.0, 43.0 - 3.5]


def test_batch_with_slow_launch_is_not_sliced() -> None:
    # A long prompt of 110 ms; a short prompt arrives during it.
    jobs = [Job(0.0, 1000), Job(0.030, 50)]
    sliced = ttft_ms(jobs, "laps", replace(STEPS, slices_launch_s=0.01))
    whole = ttft_ms(jobs, "laps", replace(STEPS, slices_launch_s=0.06))
    assert sliced[1] < 50.0 < whole[1]
    assert whole[0] == 113.0


def test_next_batch_is_decided_during_last_slice() -> None:
    # No host time passes between the batches of two long prompts.
    both = ttft_ms([Job(0.0, 1000), Job(0.001, 1000)], "laps")
    assert both == [113.0, 223.0 - 1.0]
