"""Profiles: files, use in the simulated device, fits to lone requests, and bounds derived from profiles."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from laps_core.latency.step import Coefficients, StepShape
from laps_core.policy.predict import Sizes
from laps_core.policy.types import Waiting
from laps_plan.profile import FOLDER, Profile, names
from laps_plan.sim.metrics import lone_s
from laps_plan.traffic.lengths import fixed, mix, uniform

from benchmark.fidelity.compare import Simulator, drawn
from benchmark.fidelity.host import LADDER, Host, LoneRequests


def test_profile_round_trips_and_unknown_name_is_refused(tmp_path: Path) -> None:
    made = replace(Profile.load("h100-qwen3-8b"), spread=[0.9, 1.1])
    made.save(tmp_path / "p.json")
    assert Profile.load(str(tmp_path / "p.json")) == made
    assert set(names()) == {p.stem for p in FOLDER.glob("*.json")}
    with pytest.raises(SystemExit, match="known:"):
        Profile.load("nothing")


def test_host_times_are_fitted_from_lone_requests() -> None:
    model, chunk = Coefficients(2e-8, 2e-5, 4e-6, 3e-4, 4e-3), 1024
    bare = Profile(name="", source="", coefficients=model, poll_s=0.0)
    truth = replace(bare, front_s=2e-3, front_token_s=2e-6, poll_s=1e-3, step_host_s=1e-3, reply_s=2e-3)
    tokens = [n for n in LADDER for _ in range(20)]
    host = Host(bare, chunk, LoneRequests(tokens, [float(lone_s(truth, n, 0, chunk)) for n in tokens]))
    found = host.profile(1.0)
    assert found.front_s + found.reply_s == pytest.approx(4e-3, rel=0.3)
    assert found.step_host_s + found.poll_s == pytest.approx(2e-3, rel=0.05)
    assert found.front_token_s == pytest.approx(2e-6, rel=0.05)
    assert host.profile(2.0).step_host_s == pytest.approx(2 * found.step_host_s)
    # The times of short requests reveal a host that is 1.5 times as slow under load.
    rows = drawn(mix(uniform(16, 128), fixed(2048), 0.1), 20.0, 12.0, "training")
    record = Simulator(host.profile(1.5), chunk).run("laps", rows, 1).record
    when = {(at, new): ttft for at, new, ttft in zip(record.at, record.new, record.ttft, strict=True)}
    found = host.profile_under_load("laps", rows, [when[r.at_s, r.new] for r in rows])
    assert found.details["slowed_under_load"] == pytest.approx(1.5, abs=0.1)


@pytest.mark.parametrize(("name", "bar_s"), [("h200-qwen3-32b", 0.005), ("h200-qwen3-8b", 0.005)])
def test_slices_of_full_chunk_stay_within_bar(name: str, bar_s: float) -> None:
    """Blocking time (FlowPrefill): a layer of the larger model takes 14 ms, but a slice should take 4 ms."""
    profile, shape = Profile.load(name), [(8192, 0)]
    whole_s = profile.coefficients.seconds(StepShape.of(shape))
    sizes = Sizes(profile.model(), chunk_tokens=8192, unit=1, layers=profile.layers, slice_s=0.004)
    layers, parts = sizes.slice_layers([Waiting(8192, 0, 0.0)], 8192)
    slices = profile.slices(whole_s, shape, whole_s / profile.layers * layers / parts)
    assert sum(slices) == pytest.approx(whole_s)
    assert max(slices) <= bar_s


def test_attention_over_long_history_is_never_split() -> None:
    profile, shape = Profile.load("h200-qwen3-32b"), [(8192, 100_000)]
    whole_s = profile.coefficients.seconds(StepShape.of(shape))
    attention_s = profile.coefficients.alpha * StepShape.of(shape).attention / profile.layers
    slices = profile.slices(whole_s, shape, 0.004)
    assert sorted(slices)[-profile.layers :] == pytest.approx([attention_s] * profile.layers)
    assert sorted(slices)[-profile.layers - 1] <= 0.005
