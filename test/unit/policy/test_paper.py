"""LAPS as published: strictly short first, exclusive batches, the published window."""

from __future__ import annotations

import pytest
from laps_core.config import ConfigError, LapsConfig
from laps_core.length import LONG, SHORT
from laps_core.paper import W_MIN_S, PaperPacer, Rate, pacer
from laps_core.policy.types import Running, Waiting
from laps_plan.sim.device import Device
from laps_plan.sim.request import Batch
from laps_plan.sim.variants import run
from laps_plan.traffic.streams import Open
from pacers import PROFILE
from simulated import CHUNK, HOST_PROFILE, MIX, p90

W_S = 5e-3


def make_pacer(**knobs: object) -> PaperPacer:
    found = pacer(LapsConfig(preset="paper", **knobs), chunk_tokens=CHUNK, layers=28)  # type: ignore[arg-type]
    assert isinstance(found, PaperPacer)
    return found


def short(since: float, tokens: int = 50) -> Waiting:
    return Waiting(tokens, 0, since)


def test_paper_preset_sets_overridable_defaults() -> None:
    config = LapsConfig.parse({}, '{"preset": "paper", "guard": 0.4}')
    assert (config.length_basis, config.order, config.slice_ms, config.guard) == ("prompt", "fcfs", 0.0, 0.4)
    assert LapsConfig(**config.as_dict()) == config
    with pytest.raises(ConfigError, match="preset"):
        LapsConfig.parse({}, '{"preset": "book"}')


def test_window_holds_batch_without_expected_arrivals() -> None:
    pacer = make_pacer()
    held = pacer.plan(1.0, [short(1.0)], [])
    assert held.held == "window"
    assert held.account.until_s == pytest.approx(1.0 + W_S)
    left = pacer.plan(held.account.until_s, [short(1.0)], [])
    assert (left.order, left.account.reason) == ((SHORT,), "window")


def test_long_work_runs_in_window_then_short_goes_first() -> None:
    pacer, long = make_pacer(), [Waiting(10_000, 0, 0.5), Waiting(300, 0, 0.6)]
    plan = pacer.plan(1.0, [short(1.0)], long)
    assert (plan.order, plan.long.picked, plan.long.tokens, plan.mixed, plan.long.layers) == (
        (LONG,),
        (0,),
        CHUNK,
        False,
        0,
    )
    begun = [Waiting(300, 0, 0.4), long[0]._replace(started=True)]
    plan = pacer.plan(1.0 + 2 * W_S, [short(1.0)], begun)
    assert (plan.order, plan.mixed) == ((SHORT, LONG), False)
    assert pacer.plan(1.1, [], begun).long.picked == (1,), "one prompt at a time"


def test_paper_pacer_decides_immediately() -> None:
    me = pacer(LapsConfig(preset="paper"), chunk_tokens=CHUNK, model=PROFILE.model())
    me.sizes.record_launch_time(1e-3)
    assert me.decision_time_s(1.0, [Running(cls=LONG, shape=[(1000, 0)], started=1.0)]) == 1.0


def test_depth_and_window_follow_algorithm_1() -> None:
    pacer = make_pacer(wait_max_batch=4)
    shorts = [short(1.0) for _ in range(4)]
    plan = pacer.plan(1.0, shorts, [])
    assert plan.account.reason == "depth"
    pacer.record_launch(1.0, Running(cls=SHORT, shape=[(50, 0)] * 4, short=range(4)), plan)
    # The batch was full at once, so the window becomes the shortest.
    held = pacer.plan(2.0, [short(2.0)], [])
    assert held.account.until_s == pytest.approx(2.0 + W_MIN_S)
    plan = pacer.plan(held.account.until_s, [short(2.0)], [])
    pacer.record_launch(held.account.until_s, Running(cls=SHORT, shape=[(50, 0)], short=range(1)), plan)
    # The batch was not full, so the target depth becomes its size.
    assert pacer.plan(3.0, [short(3.0)], []).account.reason == "depth"


def test_paper_variant_serves_every_request_in_batches_of_one_class(monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[frozenset[bool]] = []
    seconds = Device.seconds

    def record(device: Device, batch: Batch) -> float:
        batches.append(frozenset(request.class_tokens <= 256 for request, _, _ in batch.parts))
        return seconds(device, batch)

    monkeypatch.setattr(Device, "seconds", record)
    load = Open(MIX, 20.0, 600, seed=3)
    outcome = run("laps", load, HOST_PROFILE, chunk=CHUNK, knobs={"preset": "paper"})
    assert sorted(outcome.record.new) == sorted(job.new for job in load.arrivals())
    assert set(batches) == {frozenset([True]), frozenset([False])}


@pytest.mark.parametrize("name", ["several", "interleaved", "preflow"])
def test_proposed_policies_beat_fcfs_for_short_prompts(name: str) -> None:
    load = Open(MIX, 20.0, 600, seed=3)
    outcome, fcfs = (run(n, load, HOST_PROFILE, chunk=CHUNK) for n in (name, "fcfs"))
    assert sorted(outcome.record.new) == sorted(job.new for job in load.arrivals())
    assert p90(outcome, short=True) < p90(fcfs, short=True)


def test_arrival_rate_fades_without_arrivals() -> None:
    rate = Rate()
    for i in range(2000):
        rate.add(i * 5e-3, 1)
    assert rate.at(10.0) == pytest.approx(200, rel=0.05)
    assert rate.at(30.0) < 1.0
    rate.add(29.0, 1)
    assert rate.at(30.0) > 0.5, "times may run backwards"
