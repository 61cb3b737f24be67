"""Profiles: from published figures, from lone requests, and what is promised on them."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from laps_core.config import LapsConfig
from laps_core.latency.model import Coefficients
from laps_plan.profile import ANALYTIC, FOLDER, Profile, names
from laps_plan.sim.device import Device
from laps_plan.sim.metrics import lone_s
from laps_plan.sim.request import Batch, Request
from laps_plan.traffic.job import Job

from benchmark.sim.ablation import promised_wait_s
from benchmark.sim.roofline import GPUS, MODELS, Assumed, profile
from benchmark.sim.validate import CHUNK, LADDER, Alone, calibrate, mixed, simulated, slowed_by_load


def batch(*new: int) -> Batch:
    return Batch([(Request(i, 0.0, n), n, 0) for i, n in enumerate(new)], [])


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("model", MODELS)
def test_analytic_profiles_say_so_and_are_those_in_the_folder(gpu: str, model: str) -> None:
    made = profile(gpu, model)
    assert made.source == ANALYTIC
    assert Profile.load(made.name).coefficients == made.coefficients
    # Where prefill turns compute-bound on such hardware (LAPS, s2.1).
    assert 150 <= made.details["boundary_tokens"] <= 512
    assert made.eager_fixed_s is not None
    assert made.graph_fixed_s is not None
    assert made.coefficients.fixed <= made.eager_fixed_s


@pytest.mark.parametrize(("model", "billions"), [("qwen2.5-7b", 6.5), ("qwen2.5-14b", 13.1), ("qwen2.5-32b", 31.0)])
def test_parameters_without_embeddings_are_as_published(model: str, billions: float) -> None:
    assert MODELS[model].weights / 1e9 == pytest.approx(billions, rel=0.03)


def test_a_slower_host_costs_only_where_launches_are_what_takes_longest() -> None:
    slow = Assumed(breakable_layer_s=1e-3)
    assert profile("h200", "qwen2.5-7b", slow).coefficients.fixed == pytest.approx(28e-3 + slow.around_s)
    assert profile("h200", "qwen2.5-7b", slow).graph_fixed_s == profile("h200", "qwen2.5-7b").graph_fixed_s


def test_profiles_survive_the_disk(tmp_path: Path) -> None:
    made = replace(profile("h100", "qwen2.5-7b"), spread=[0.9, 1.1])
    made.save(tmp_path / "p.json")
    assert Profile.load(str(tmp_path / "p.json")) == made
    assert set(names()) == {p.stem for p in FOLDER.glob("*.json")}
    with pytest.raises(SystemExit, match="known:"):
        Profile.load("nothing")


def test_cells_replay_where_they_are_faster_and_cover_the_batch() -> None:
    known = profile("h200", "qwen2.5-7b").eager()
    device = Device(known, graphs=LapsConfig(graphs=True))
    covered, long = batch(20, 30, 40), batch(20, 4000)
    with_cells, without = device.seconds(covered), Device(known).seconds(covered)
    assert covered.replayed
    assert with_cells < without
    device.seconds(long)
    assert not long.replayed
    # On SGLang's own graphs a step of this model waits for its weights anyhow: no graph pays.
    other = batch(20, 30, 40)
    Device(profile("h200", "qwen2.5-7b"), graphs=LapsConfig(graphs=True)).seconds(other)
    assert not other.replayed


def test_host_times_are_found_in_lone_requests() -> None:
    model = Coefficients(2e-8, 2e-5, 4e-6, 3e-4, 4e-3)
    truth = Profile(
        name="", source="", coefficients=model, front_s=2e-3, front_token_s=2e-6, poll_s=1e-3, step_host_s=1e-3,
        reply_s=2e-3,
    )  # fmt: skip
    bare = Profile(name="", source="", coefficients=model, poll_s=0.0)
    rng = random.Random(0)
    tokens = [n for n in LADDER for _ in range(20)]
    device = [float(lone_s(bare, n, 0, CHUNK)) * rng.lognormvariate(0.0, 0.05) for n in tokens]
    around = [float(lone_s(truth, n, 0, CHUNK) - lone_s(bare, n, 0, CHUNK)) for n in tokens]
    seen = Alone(tokens, [d + a for d, a in zip(device, around, strict=True)], device)
    found = calibrate(model, seen, 1.0)
    assert found.front_s + found.reply_s == pytest.approx(4e-3, rel=0.3)
    assert found.step_host_s + found.poll_s == pytest.approx(2e-3, rel=0.15)
    assert found.front_token_s == pytest.approx(2e-6, rel=0.2)
    assert calibrate(model, seen, 2.0).step_host_s == pytest.approx(2 * found.step_host_s)
    # A host that is half as slow again under load is told by what short requests took there.
    rows = mixed(20.0, 12.0, "training")
    record = simulated(calibrate(model, seen, 1.5), "laps", rows, 1).record
    when = {(at, new): ttft for at, new, ttft in zip(record.at, record.new, record.ttft, strict=True)}
    assert slowed_by_load(model, seen, rows, [when[r.at_s, r.new] for r in rows]) == pytest.approx(1.5, abs=0.1)


def test_what_gap_and_guard_promise() -> None:
    known = Profile(name="", source="", coefficients=Coefficients(0.0, 1e-4, 0.0, 0.0, 0.01), poll_s=0.0)
    rows = [Job(0.0, 4000, 0), Job(0.0, 4000, 0), Job(1.0, 100, 0)]
    batch = 0.8292  # of 8,192 tokens
    # Half of the time between runs of short batches of one chunk each, a gap of 0.1 s apart; the second waits for the
    # first.
    stretched = batch / 0.5 * (4.0 + batch / 0.1)
    config = LapsConfig(guard=0.5, preempt_overhead=0.1)
    assert promised_wait_s(known, rows, config) == pytest.approx((2 + 2) * stretched + 0.4 + batch)
    for worse in (LapsConfig(guard=0.25, preempt_overhead=0.1), LapsConfig(guard=0.5, preempt_overhead=0.2)):
        assert promised_wait_s(known, rows, worse) > promised_wait_s(known, rows, config)
