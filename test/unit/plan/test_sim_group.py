"""Simulated servers with data-parallel attention: no lost work; the joint plan compared with SGLang's scheduling."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from laps_core.config import LapsConfig
from laps_plan.profile import Profile
from laps_plan.sim.engine import Events, simulate
from laps_plan.sim.fleet import Single
from laps_plan.sim.group import Assign, GroupBatch, GroupServer, Ranks
from laps_plan.sim.metrics import Outcome, lone_s
from laps_plan.sim.ranks import Joint
from laps_plan.sim.request import Request
from laps_plan.sim.variants import group_policy, run
from laps_plan.traffic.job import Job
from laps_plan.traffic.lengths import log_uniform, mix, uniform
from laps_plan.traffic.streams import Open, Trace
from laps_plan.traffic.turns import Turn, jobs
from simulated import p90

PROFILE = Profile.load("h200-deepseek-v3-dp8").with_ranks(4)
SIZES = mix(uniform(8, 256), log_uniform(1024, 40_000), 0.1)
GROUPS: dict[str, tuple[str, dict[str, Any]]] = {
    "fcfs": ("fcfs", {}), "hrrn": ("hrrn", {}), "spf": ("shortest-prefill-first", {}), "laps": ("laps", {}),
    "whole": ("laps", {"slice_ms": 0.0}),
}  # fmt: skip
"""Name -> policy, and knobs of LAPS."""


def simulate_group(name: str, load: Any, chunk: int = 4 * 8192, **how: Any) -> Outcome:
    policy, knobs = GROUPS[name]
    return run(policy, load, PROFILE, chunk=chunk, knobs=knobs, **how)


@pytest.mark.parametrize("name", GROUPS)
def test_every_token_is_computed_once_and_every_request_answered(name: str) -> None:
    computed: Counter[int] = Counter()
    chosen, knobs = GROUPS[name]
    policy = group_policy(chosen, PROFILE, 4 * 2048, knobs)

    class Devices(Ranks):
        def seconds(self, batch: GroupBatch) -> float:
            if not batch.continues_step:
                for rank, parts in enumerate(batch.parts):
                    for request, new, _ in parts:
                        assert request.rank == rank
                        computed[request.number] += new
            return super().seconds(batch)

    jobs = list(Open(SIZES, 20.0, 150, seed=3).arrivals())
    events = Events()
    server = GroupServer("one", policy, Devices(PROFILE), events, Assign(4))
    outcome = simulate(Trace(jobs), Single([server]), events)
    assert len(outcome.record) == len(jobs)
    assert computed == {job.number: job.new for job in jobs}
    assert policy.waiting_tokens == 0


def test_lone_request_takes_predicted_time() -> None:
    outcome = simulate_group("laps", Trace([Job(0.0, 3000, 20_000)]))
    assert outcome.record.ttft[0] == pytest.approx(lone_s(PROFILE, 3000, 20_000, None), rel=1e-2)


def test_short_requests_do_not_wait_for_long_prompts() -> None:
    load = [Job(0.0, 100_000), *(Job(0.1 + 0.05 * i, 100) for i in range(20))]
    stock, laps = (p90(simulate_group(name, Trace(load)), short=True) for name in ("spf", "laps"))
    assert laps < 0.5 * stock


def test_overlap_loop_increases_mean_ttft() -> None:
    loads = [Open(uniform(100, 3000), 25.0, 200, seed=5) for _ in range(2)]
    plain, overlapped = (
        simulate_group("whole", load, overlap=overlap) for load, overlap in zip(loads, (False, True), strict=True)
    )
    assert sum(overlapped.record.ttft) > 1.1 * sum(plain.record.ttft)


def test_session_turns_stay_at_dp_rank_with_history() -> None:
    turns = [Turn(500, 4000, 0.0), Turn(100, 4500, 1.0), Turn(100, 4600, 1.0)]
    at: dict[int, set[int]] = {}

    class Watched(Joint):
        def add(self, rank: int, request: Request, now: float) -> None:
            assert request.left <= 500, "its history was lost"
            at.setdefault(request.session, set()).add(rank)
            super().add(rank, request, now)

    events = Events()
    server = GroupServer("one", Watched(PROFILE, LapsConfig(slice_ms=0.0)), Ranks(PROFILE), events, Assign(4))
    outcome = simulate(Trace(jobs([(0.001 * i, turns) for i in range(8)])), Single([server]), events)
    assert len(outcome.record) == 24
    assert all(len(ranks) == 1 for ranks in at.values())
    assert len(set.union(*at.values())) > 1


def test_with_ranks_rescales_costs_or_raises() -> None:
    whole = Profile.load("h200-deepseek-v3-dp8")
    assert whole.group is not None
    assert PROFILE.group is not None
    assert PROFILE.group.token == pytest.approx(whole.group.token / 2)
    assert PROFILE.group.expert == whole.group.expert
    more = whole.with_ranks(16).group
    assert more is not None
    assert (more.token, more.expert) == (whole.group.token, whole.group.expert / 2)
    for ranks, name in ((3, "h200-deepseek-v3-dp8"), (2, "h200-qwen3-8b")):
        with pytest.raises(ValueError, match="ranks"):
            Profile.load(name).with_ranks(ranks)


@pytest.mark.parametrize(("name", "least", "most"), [("deepseek-v3", 48e3, 58e3), ("qwen3-235b-a22b", 30e3, 38e3)])
def test_full_group_steps_have_expected_throughput(name: str, least: float, most: float) -> None:
    group = Profile.load(f"h200-{name}-dp8").group
    assert group is not None
    for prompt in (1024, 2048, 4096):
        shape = group.shape([(prompt, 0)] * (8192 // prompt))
        assert least < 8 * 8192 / group.seconds([shape] * 8) < most


def test_group_profile_round_trips(tmp_path: Any) -> None:
    path = tmp_path / "group.json"
    PROFILE.save(path)
    assert Profile.load(str(path)) == replace(PROFILE, details=PROFILE.details)
