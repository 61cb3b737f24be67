"""Closed loops that count all clients: whole cycles, checked by Little's law."""

from __future__ import annotations

import random
from dataclasses import asdict

import pytest
from laps_plan.profile import Profile
from laps_plan.sim.variants import run
from laps_plan.traffic.lengths import fixed, log_uniform, mix
from laps_plan.traffic.little import Asked, steady
from laps_plan.traffic.streams import Closed

SHORT_S, PARKED_S = 0.01, 5.0


def parking(clients: int, long_share: float, until_s: float) -> list[Asked]:
    """Return requests to a server that answers short prompts in 10 ms and parks each long prompt for 5 s."""
    asked, rng = [], random.Random(1)
    for client in range(clients):
        now = 0.0
        while now < until_s:
            long = rng.random() < long_share
            took = PARKED_S if long else SHORT_S
            asked.append(Asked(client, now, took, took, 2000 if long else 50))
            now += took
    return asked


def throughput_and_ttft(answers: list[Asked], begin_s: float, end_s: float) -> tuple[float, float]:
    """Return rate and mean TTFT of the answers within a time range, which misses parked prompts."""
    seen = [a for a in answers if begin_s <= a.sent_s + a.took_s < end_s]
    return len(seen) / (end_s - begin_s), sum(a.took_s for a in seen) / len(seen)


def test_whole_cycles_count_parked_prompts_that_time_range_misses() -> None:
    clients = 32
    asked = parking(clients, 0.01, 40.0)
    rate, mean_s = throughput_and_ttft(asked, 0.0, 4.0)
    assert rate * mean_s < 0.4 * clients, "the old way"
    found = steady(asked, clients, 0.0, 4.0)
    assert found.littles_ratio == pytest.approx(1.0, abs=0.05)
    true = clients / (0.99 * SHORT_S + 0.01 * PARKED_S)
    assert found.requests_per_s < 0.8 * rate
    long = steady(asked, clients, 0.0, 30.0)
    assert long.requests_per_s == pytest.approx(true, rel=0.15)
    assert sum(long.tokens_per_s.values()) == pytest.approx(true * (0.99 * 50 + 0.01 * 2000), rel=0.2)
    assert set(asdict(found)) >= {"clients", "requests_per_s", "mean_ttft_s", "littles_ratio", "tokens_per_s"}


def test_littles_law_fails_for_missing_or_idle_clients() -> None:
    asked = [Asked(client, 0.1 * i, 0.1, 0.1, 1) for client in range(9) for i in range(50)]
    assert steady(asked, 9, 1.0, 4.0).require("a server").holds
    with pytest.raises(ConnectionError, match=r"^a server: .*of 10 clients do not add up .*0\.90"):
        steady(asked, 10, 1.0, 4.0).require("a server")
    idle = [a._replace(took_s=0.05, ttft_s=0.05) for a in asked]
    assert not steady(idle, 9, 1.0, 4.0).holds, "clients that do not ask at once are none of a closed loop"
    nothing = steady([], 3, 0.0, 1.0)
    assert (nothing.requests, nothing.holds) == (0, False)


@pytest.mark.parametrize("name", ["fcfs", "shortest-prefill-first", "laps"])
@pytest.mark.parametrize("overlap", [False, True])
def test_simulated_closed_loops_satisfy_littles_law(name: str, overlap: bool) -> None:
    sizes = mix(fixed(50), log_uniform(1024, 8192), 0.05)
    profile = Profile.load("h200-qwen3-8b")
    outcome = run(name, Closed(sizes, 32, 5000, 3), profile, overlap=overlap)
    found = outcome.steady(32).require(name)
    assert found.requests == pytest.approx(4000, abs=40)
    assert found.mean_ttft_s > 0.0


def test_too_short_closed_loop_run_fails_littles_law() -> None:
    sizes = mix(fixed(50), log_uniform(1024, 8192), 0.05)
    outcome = run("laps", Closed(sizes, 32, 600, 3), Profile.load("h200-qwen3-8b"))
    with pytest.raises(ConnectionError, match="measure for longer"):
        outcome.steady(32).require("laps")
