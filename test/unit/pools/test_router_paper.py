"""The router of LAPS as published: pools from the start, classes by the whole prompt, one move per period."""

from __future__ import annotations

import pytest
from choosing import choose_and_record
from laps_core.config import ConfigError
from laps_core.pools.config import AllocConfig
from laps_core.pools.paper import PaperController, PaperPools, controller, pools
from laps_core.pools.prefixes import Ask, fingerprint
from laps_core.pools.pressure import InstanceSignals
from laps_core.protocol import Load
from laps_plan.profile import Profile
from laps_plan.sim.variants import run
from laps_plan.traffic.lengths import log_uniform, mix, uniform
from laps_plan.traffic.streams import Open

TEXT = b"".join(b"%08d" % i for i in range(1024))
PAPER = AllocConfig(preset="paper")


def test_paper_pools_divide_fleet_and_classify_by_whole_prompt() -> None:
    p = pools([(f"http://p{i}:1", 1) for i in range(5)], PAPER, lambda: 0.0)
    assert isinstance(p, PaperPools)
    assert [i.pool for i in p.instances] == ["short"] * 2 + ["long"] * 3
    p.instances[0].prefixes.add(fingerprint(TEXT))
    choice = choose_and_record(p, Ask(2048, [fingerprint(TEXT)]))
    assert choice is not None
    assert (choice.length_class, choice.instance.pool, choice.new_tokens, choice.why) == ("long", "long", 2048, "pool")
    assert choice.why != "spill"
    with choice.lease():
        following = choose_and_record(p, Ask(2048))
        assert following is not None
        assert following.instance is not choice.instance
    for instance in p.members("long"):
        instance.healthy = False
    spilled = choose_and_record(p, Ask(2048))
    assert spilled is not None
    assert (spilled.why, spilled.instance.pool) == ("spill", "short")
    with pytest.raises(ConfigError, match="needs 2"):
        pools([("http://p:1", 1)], PAPER, lambda: 0.0)


def test_paper_controller_moves_one_server_per_period() -> None:
    me = controller(AllocConfig(preset="paper"), 0.0)
    assert isinstance(me, PaperController)

    def signals(short: float, long: float) -> list[InstanceSignals]:
        load = [Load(backlog_tokens=short if i < 2 else long, slo_deviation=0.0, busy_share=0.5) for i in range(8)]
        return [InstanceSignals(name=f"p{i}", pool="short" if i < 2 else "long", load=load[i]) for i in range(8)]

    seen = [me.step(float(now), signals(50_000.0, 100.0)) for now in range(1, 16)]
    moves = [move for beat in seen for move in beat]
    assert {(m.source, m.target) for m in moves} == {("long", "short")}
    assert max(map(len, seen)) == 1
    assert 2 <= len(moves) <= 3, "in three periods"
    calm = controller(AllocConfig(preset="paper"), 0.0)
    assert not any(calm.step(float(now), signals(15_000.0, 10_000.0)) for now in range(1, 16))


def test_simulator_completes_run_with_paper_router() -> None:
    load = Open(mix(uniform(8, 256), log_uniform(1024, 8192), 0.1), 30.0, 300, seed=1)
    knobs, profile = {"preset": "paper"}, Profile.load("h200-qwen3-8b")
    outcome = run("laps", load, profile, servers=3, router="pools", knobs=knobs, alloc=PAPER)
    assert len(outcome.record) == 300
