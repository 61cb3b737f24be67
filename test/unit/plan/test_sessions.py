"""Sessions: a turn waits for the previous answer; another rate means more sessions, not shorter pauses."""

from __future__ import annotations

import random
from collections import defaultdict
from pathlib import Path

import pytest
from laps_plan.plan.setup import LAPS, Question
from laps_plan.plan.trials import Trials
from laps_plan.profile import Profile
from laps_plan.sim.variants import run
from laps_plan.traffic.files import read
from laps_plan.traffic.job import Job
from laps_plan.traffic.named import Offer, Scale, make
from laps_plan.traffic.streams import Trace

PROFILE = Profile.load("h200-qwen3-8b")
HEADS = "session,t_ms,think_ms,new_tokens,cached_tokens,output_tokens"


def write_sessions(folder: Path, sessions: int = 40, turns: int = 10) -> Path:
    """Write sessions whose turns start 2 s after the previous answer of 50 tokens, and return the file."""
    path = folder / "sessions.csv"
    rows = [f"{s},{9000 * t},2000,{400 + t},{1000 * t},50" for s in range(sessions) for t in range(turns)]
    path.write_text("\n".join([HEADS, *rows]))
    return path


def waits(jobs: list[Job]) -> list[tuple[Job, Job]]:
    return [(jobs[job.after], job) for job in jobs if job.after is not None]


def test_session_turn_starts_think_time_after_answer(tmp_path: Path) -> None:
    jobs = list(read(write_sessions(tmp_path)).jobs)
    assert len(jobs) == 400
    pairs = waits(jobs)
    assert len(pairs) >= 400 - 40 - 5
    assert all(b.stream == a.stream and b.pause_s == pytest.approx(2.0 + 50 * 0.02) for a, b in pairs)
    stream = Trace(jobs)
    first = next(a for a, _ in pairs)
    number = jobs.index(first)
    list(stream.arrivals())
    following = stream.answered(first.at_s + 100.0, Job(first.at_s, 1, number=number))
    assert following is not None
    assert following.at_s == pytest.approx(first.at_s + 103.0), "however late the answer was"


@pytest.mark.parametrize("factor", [0.25, 1.0, 3.0])
def test_rate_change_does_not_change_think_time(tmp_path: Path, factor: float) -> None:
    traffic = read(write_sessions(tmp_path))
    scaled = traffic.at_rate(traffic.rate / factor)
    assert scaled.rate == pytest.approx(traffic.rate / factor, rel=0.1)
    assert len(scaled.jobs) == len(traffic.jobs)
    pairs = waits(list(scaled.jobs))
    assert len(pairs) >= 400 - 40 - 5
    assert all(b.at_s - a.at_s == pytest.approx(3.0) for a, b in pairs)


def test_excerpt_of_sessions_waits_only_for_included_turns(tmp_path: Path) -> None:
    cut = read(write_sessions(tmp_path)).cut(100, newest=True)
    assert len(cut.jobs) == 100
    pairs = waits(list(cut.jobs))
    assert len(pairs) >= 100 - 40 - 5
    assert all(a.stream == b.stream and a.at_s <= b.at_s for a, b in pairs)


def test_planner_runs_all_session_turns(tmp_path: Path) -> None:
    traffic = read(write_sessions(tmp_path))
    trials = Trials(Question(PROFILE, 2, 0.4, 4.0, 8192), traffic)
    told: list[int] = []
    trials.tell = told.append
    sample = trials.whole(trials.question.setup(LAPS))
    assert len(sample.ttft) == sum(told) == 400
    assert 0.0 < trials.load < 1.0
    assert trials.in_time(trials.question.setup(LAPS), 0.5, 2) > 0.9


def test_agents_workload_is_steady_with_few_short_turns() -> None:
    workload = make("agents", Scale(65536, 16384))
    jobs = workload.arrivals(Offer(1.0, 600.0, 5.0, lambda new: 1.0), random.Random(3))
    assert 2000 < len(jobs) < 4000
    thirds = [sum(200.0 * i <= job.at_s < 200.0 * (i + 1) for job in jobs) / len(jobs) for i in range(3)]
    assert all(0.28 < share < 0.39 for share in thirds)
    assert 0.05 < sum(job.new <= 256 for job in jobs) / len(jobs) < 0.25
    assert max(job.new + job.cached for job in jobs) <= 65536
    by_stream: dict[int, list[Job]] = defaultdict(list)
    for job in jobs:
        by_stream[job.stream].append(job)
    assert all(job.after is not None for chain in by_stream.values() for job in chain[1:])
    assert workload.reuses


def test_sub_agent_turn_keeps_session_history_cached() -> None:
    turns = [(0.0, 5000, 0), (1.0, 300, 0), (2.0, 100, 5000)]
    jobs = [Job(at, new, cached, 1, continues_stream=True) for at, new, cached in turns]
    outcome = run("fcfs", Trace(jobs), PROFILE, servers=2)
    assert sorted(zip(outcome.record.new, outcome.record.cached, strict=True)) == [(100, 5000), (300, 0), (5000, 0)]
