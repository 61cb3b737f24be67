"""Many simulated servers: balancing, prefixes, pools."""

from __future__ import annotations

import random

import pytest
from laps_core.latency.step import Coefficients
from laps_core.pools.config import AllocConfig
from laps_plan.profile import Profile
from laps_plan.sim.variants import run
from laps_plan.traffic.job import Job
from laps_plan.traffic.lengths import fixed, log_uniform, mix, uniform
from laps_plan.traffic.streams import Open, Trace, poisson
from simulated import Sessions, p90

PROFILE = Profile(name="test", source="made up", coefficients=Coefficients(2e-9, 2e-5, 1e-9, 1e-5, 5e-3))
MIX = mix(uniform(8, 256), log_uniform(1000, 20000), 0.1)
ROUTERS = ("round-robin", "least-load", "pools")


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("servers", [2, 7])
def test_fleet_loses_no_request_and_uses_all_servers(router: str, servers: int) -> None:
    outcome = run("laps", Open(MIX, 20.0 * servers, 1500), PROFILE, servers=servers, router=router)
    assert len(outcome.record) == 1500
    assert len(outcome.busy_s) == servers
    assert min(outcome.busy_s) > 0.0


def test_least_load_beats_round_robin_for_short_requests() -> None:
    plain, least = (
        p90(run("fcfs", Open(MIX, 70.0, 6000, seed=2), PROFILE, servers=4, router=r), short=True)
        for r in ("round-robin", "least-load")
    )
    assert least < plain


def test_pools_beat_least_load_for_short_requests() -> None:
    load, divided = Open(MIX, 70.0, 6000, seed=2), AllocConfig(initial_short=1)
    least, pools = (
        p90(run("fcfs", load, PROFILE, servers=4, router=r, alloc=divided), short=True) for r in ("least-load", "pools")
    )
    assert pools < least


def test_pools_follow_load_changes() -> None:
    # Two short and six long servers; first nearly all work is long, later all work is short.
    rows = [Job(i / 12.0, 20000, 0) for i in range(12 * 25)]
    rows += [Job(25.0 + i / 900.0, 200, 0) for i in range(900 * 12)]
    config = AllocConfig(initial_short=4)
    outcome = run("laps", Trace(rows), PROFILE, servers=8, router="pools", alloc=config)
    early = {target for at, _, target in outcome.moves if at < 25.0}
    late = {target for at, _, target in outcome.moves if at > 30.0}
    assert early == {"long"}
    assert "short" in late


@pytest.mark.parametrize("seed", [1, 2])
def test_mix_change_moves_servers_promptly_without_reversal(seed: int) -> None:
    n, period_s, span_s, rng = 16, 2.0, 16.0, random.Random(seed)
    profile = Profile(name="test", source="made up", coefficients=Coefficients(0.0, 1 / 6000, 0.0, 0.0, 1e-4))
    rows = []
    for phase, share in enumerate((0.9, 0.1, 0.9)):
        rate = 0.6 * n * 6000 / (share * 240 + (1 - share) * 720)
        draw = mix(fixed(240), fixed(720), 1 - share)
        rows += [Job(phase * span_s + at, draw(rng)) for at in poisson(rate, span_s, rng)]
    config = AllocConfig(initial_short=n // 2, interval_s=period_s)
    found = run("laps", Trace(rows), profile, servers=n, router="pools", alloc=config).moves
    for phase, towards in ((1, "long"), (2, "short")):
        moves = [(at - phase * span_s, to) for at, _, to in found if 0 <= at - phase * span_s < span_s]
        assert moves[-1][0] <= 3 * period_s
        assert {to for _, to in moves} == {towards}


def test_session_prefix_is_reused_except_with_round_robin() -> None:
    def computed(servers: int, router: str) -> int:
        turns = Sessions(fixed(1000), 12, 2000, 1, turn=fixed(50), reply=fixed(100), think_s=0.5)
        return sum(run("laps", turns, PROFILE, servers=servers, router=router).record.new)

    one = computed(1, "round-robin")
    assert computed(6, "least-load") < 1.05 * one
    assert computed(6, "pools") < 1.5 * one
    assert computed(6, "round-robin") > 1.5 * one


def test_history_in_shared_cache_is_never_computed() -> None:
    rows = [Job(i * 0.1, 50, 30_000) for i in range(200)]
    for router in ROUTERS:
        outcome = run("laps", Trace(rows), PROFILE, servers=3, router=router)
        assert set(outcome.record.new) == {50}


def test_two_server_pools_are_no_slower_than_round_robin() -> None:
    for share in (0.02, 0.1, 0.5):
        sizes = mix(uniform(8, 256), log_uniform(1000, 8000), share)
        rate = 1.2 / (0.02 + share * 0.2)
        plain, pools = (
            run("laps", Open(sizes, rate, 3000, seed=3), PROFILE, servers=2, router=r) for r in ("round-robin", "pools")
        )
        for short in (True, False):
            most = 1.05 * p90(plain, short=short, warm=0.1)
            assert p90(pools, short=short, warm=0.1) <= most, (share, short)


def test_controller_survives_million_token_prompts() -> None:
    rng = random.Random(4)
    profile = Profile(name="test", source="made up", coefficients=Coefficients(1e-10, 1e-5, 1e-9, 1e-4, 5e-3))
    for servers in (2, 4):
        rows, at = [], 0.0
        for _ in range(200):
            at += rng.expovariate(servers / 8.0)
            rows.append(Job(at, int(10 ** rng.uniform(2.0, 6.0)), 20_000))
        outcome = run("fcfs", Trace(rows), profile, servers=servers, router="pools")
        assert len(outcome.record) == 200
