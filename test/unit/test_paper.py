"""LAPS as published: strictly short first, exclusive batches, the published window."""

from __future__ import annotations

import pytest
from laps_core.config import ConfigError, LapsConfig
from laps_core.length import LONG, SHORT
from laps_core.paper import W_MIN_S, PaperPacer, Rate, pacer
from laps_core.policy.types import Running, Waiting
from laps_plan.sim.variants import VARIANTS, run
from laps_plan.traffic.streams import Open
from pacers import KNOWN
from simulated import CHUNK, HOST, MIX

W_S = 5e-3


def made(**knobs: object) -> PaperPacer:
    found = pacer(LapsConfig(preset="paper", **knobs), chunk_tokens=CHUNK, layers=28)  # type: ignore[arg-type]
    assert isinstance(found, PaperPacer)
    return found


def short(since: float, tokens: int = 50) -> Waiting:
    return Waiting(tokens, 0, since)


def test_a_preset_gives_defaults_and_no_more() -> None:
    config = LapsConfig.parse({}, '{"preset": "paper", "guard": 0.4}')
    assert (config.length_basis, config.order, config.slice_ms, config.guard) == ("prompt", "fcfs", 0.0, 0.4)
    assert LapsConfig(**config.as_dict()) == config
    with pytest.raises(ConfigError, match="preset"):
        LapsConfig.parse({}, '{"preset": "book"}')


def test_a_batch_is_held_for_the_whole_window_with_nobody_expected() -> None:
    me = made()
    held = me.plan(1.0, [short(1.0)], [])
    assert held.held == "window"
    assert held.account.until_s == pytest.approx(1.0 + W_S)
    left = me.plan(held.account.until_s, [short(1.0)], [])
    assert (left.order, left.account.reason) == ((SHORT,), "window")


def test_long_work_runs_during_the_window_and_short_requests_go_first_after_it() -> None:
    me, long = made(), [Waiting(10_000, 0, 0.5), Waiting(300, 0, 0.6)]
    plan = me.plan(1.0, [short(1.0)], long)
    assert (plan.order, plan.long.picked, plan.long.tokens, plan.mixed, plan.long.layers) == (
        (LONG,),
        (0,),
        CHUNK,
        False,
        0,
    )
    begun = [Waiting(300, 0, 0.4), long[0]._replace(started=True)]
    plan = me.plan(1.0 + 2 * W_S, [short(1.0)], begun)
    assert plan.order[0] == SHORT
    assert not plan.mixed
    assert me.plan(1.1, [], begun).long.picked == (1,), "one prompt at a time"


def test_what_follows_is_decided_at_once() -> None:
    me = pacer(LapsConfig(preset="paper"), chunk_tokens=CHUNK, model=KNOWN.model())
    me.sizes.record_launch_time(1e-3)
    assert me.decision_time_s(1.0, [Running(cls=LONG, shape=[(1000, 0)], started=1.0)]) == 1.0


def test_depth_and_window_follow_as_written() -> None:
    me = made(wait_max_batch=4)
    shorts = [short(1.0) for _ in range(4)]
    plan = me.plan(1.0, shorts, [])
    assert plan.account.reason == "depth"
    me.record_launch(1.0, Running(cls=SHORT, shape=[(50, 0)] * 4, short=range(4)), plan)
    # The batch was full at once, so the window becomes the shortest.
    held = me.plan(2.0, [short(2.0)], [])
    assert held.account.until_s == pytest.approx(2.0 + W_MIN_S)
    plan = me.plan(held.account.until_s, [short(2.0)], [])
    me.record_launch(held.account.until_s, Running(cls=SHORT, shape=[(50, 0)], short=range(1)), plan)
    # The batch was not full, so the target depth becomes its size.
    assert me.plan(3.0, [short(3.0)], []).account.reason == "depth"


def test_classes_are_by_the_whole_prompt_and_nothing_is_lost() -> None:
    load = Open(MIX, 20.0, 600, seed=3)
    outcome = run(VARIANTS["paper"], load, HOST, chunk=CHUNK)
    assert sorted(outcome.record.new) == sorted(job.new for job in load.arrivals())


@pytest.mark.parametrize("name", ["several", "interleaved", "preflow"])
def test_stock_of_tomorrow_lets_short_prompts_pass_long_ones(name: str) -> None:
    load = Open(MIX, 20.0, 600, seed=3)
    outcome, fcfs = (run(VARIANTS[n], load, HOST, chunk=CHUNK) for n in (name, "fcfs"))
    assert sorted(outcome.record.new) == sorted(job.new for job in load.arrivals())
    assert outcome.groups()["short"].ttft["p90"] < fcfs.groups()["short"].ttft["p90"]


def test_the_rate_of_arrivals_fades_in_silence() -> None:
    rate = Rate()
    for i in range(2000):
        rate.add(i * 5e-3, 1)
    assert rate.at(10.0) == pytest.approx(200, rel=0.05)
    assert rate.at(30.0) < 1.0
    rate.add(29.0, 1)
    assert rate.at(30.0) > 0.5, "times may run backwards"
