"""Goodput: tasks with their own objectives, and the highest rate that meets the objectives."""

from __future__ import annotations

import statistics

import pytest
from laps_plan.profile import Profile
from laps_plan.traffic import tasks

from benchmark.sim.goodput import WAYS, Study

STUDY = Study(Profile.load("h200-qwen3-8b"), "8b", 200, (1,))


def test_tasks_have_their_shares_lengths_and_objectives() -> None:
    jobs = tasks.jobs(50.0, 8000, "8b", 1)
    by_objective = {slo: [job.new for job in jobs if job.slo_s == slo] for slo in tasks.OBJECTIVES_S["8b"]}
    for task, new in zip(tasks.TASKS, by_objective.values(), strict=True):
        assert len(new) / len(jobs) == pytest.approx(task.share, abs=0.02)
        assert statistics.mean(new) == pytest.approx(task.tokens, rel=0.12)


def test_goodput_rate_meets_objectives_and_fourfold_rate_does_not() -> None:
    way = WAYS["laps"]
    rate = STUDY.goodput(way, 100.0)
    assert STUDY.in_time(way, rate) >= 0.9
    assert STUDY.in_time(way, 4.0 * rate) < 0.9
