"""Deadlines: late requests run last, a request that would miss its deadline preempts, batches keep deadlines."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from laps_core.config import LapsConfig
from laps_core.latency.model import LatencyModel
from laps_core.latency.step import Coefficients
from laps_core.length import LONG, SHORT
from laps_core.policy.fairness import LATE, Guard
from laps_core.policy.pacer import Pacer
from laps_core.policy.types import Paused, Waiting
from laps_plan.profile import Profile
from laps_plan.sim.variants import run
from laps_plan.traffic import tasks
from laps_plan.traffic.job import Job
from laps_plan.traffic.streams import Trace

MODEL = Coefficients(alpha=0.0, linear=1e-4, gamma_r=0.0, per_request=0.0, fixed=0.01)
"""Latency model with 10,000 tokens per second and 10 ms per step."""
NOW = 100.0


def pacer(order: str) -> Pacer:
    config: Any = {"order": order}
    return Pacer(LapsConfig(**config), chunk_tokens=8192, layers=28, model=LatencyModel(MODEL))


def prompt(tokens: int, due_s: float | None, since_s: float = 99.0) -> Waiting:
    return Waiting(tokens, 0, since_s, None if due_s is None else NOW + due_s)


@pytest.mark.parametrize("order", ["least-work", "s-edf", "lars"])
def test_prompt_that_would_miss_deadline_preempts_paused_prompt(order: str) -> None:
    paused = Paused(0.5, 1, weight=1.0, deadlines=(NOW + 5.0,))
    plan = pacer(order).plan(NOW, [], [prompt(3000, 6.0), prompt(1000, 0.3)], paused=paused)
    assert (plan.order, plan.long.picked) == ((LONG,), (1,))
    urgent = Paused(0.5, 1, weight=1.0, deadlines=(NOW + 0.52,))
    assert not pacer(order).plan(NOW, [], [prompt(6000, 0.7)], paused=urgent).order, "one of both would miss it"
    assert not pacer(order).plan(NOW, [], [prompt(1000, 0.3)], paused=paused._replace(depth=2)).order


def test_deadline_of_paused_prompt_counts_equally() -> None:
    """The work takes 0.11 s; the paused prompt would end in 0.5 s."""
    one, urgent = [prompt(1000, 0.3)], Paused(0.5, 1, weight=0.1, deadlines=(NOW + 0.55,))
    assert pacer("s-edf").plan(NOW, [], one, paused=urgent).order == (LONG,), "both would miss one: the sums decide"
    assert not pacer("s-edf").plan(NOW, [], one, paused=urgent._replace(weight=100.0)).order


def test_hopeless_deadline_of_paused_batch_hides_no_other() -> None:
    """The short work takes 15 ms. The paused batch would end in 0.5 s."""
    paused = Paused(0.5, 1, weight=0.1, deadlines=(NOW + 0.1, NOW + 0.505))
    assert not pacer("least-work").plan(NOW, [prompt(50, 5.0)], [], paused=paused).order, "the second can be in time"
    assert not pacer("least-work").plan(NOW, [], [prompt(300, None)], paused=paused).order, "a deadline goes first"
    hopeless = paused._replace(deadlines=(NOW + 0.1,))
    assert pacer("least-work").plan(NOW, [prompt(50, 5.0)], [], paused=hopeless).order == (SHORT,)
    assert pacer("least-work").plan(NOW, [], [prompt(300, None)], paused=hopeless).order == (LONG,)


def test_urgent_prompt_preempts_again_after_fixed_step_time() -> None:
    """The gap is 40 ms, a step's fixed time 10 ms; work of 0.11 s is due in 0.3 s."""
    for due_s, moved_s, again in ((0.3, 0.009, False), (0.3, 0.011, True), (None, 0.011, False), (None, 0.041, True)):
        one, me = prompt(1000, due_s), pacer("least-work")
        paused = Paused(0.5, 1, weight=0.1, deadlines=(NOW + 5.0,))
        assert me.plan(NOW, [], [one], paused=paused).order == (LONG,)
        assert bool(me.plan(NOW, [], [one], paused=paused._replace(left_s=0.5 - moved_s)).order) == again


def test_short_request_preempts_unless_paused_prompt_becomes_late() -> None:
    calm = Waiting(50, 0, 99.0, NOW + 5.0)
    paused = Paused(0.5, 1, weight=0.1, deadlines=(NOW + 5.0,))
    decide = pacer("least-work").plan
    assert decide(NOW, [calm], [], paused=paused).order == (SHORT,)
    assert decide(NOW, [calm._replace(deadline_s=None)], [], paused=paused).order == (SHORT,)
    assert not decide(NOW, [calm], [], paused=paused._replace(deadlines=(NOW + 0.505,))).order, "that one would be late"


def test_batch_is_filled_while_its_prompts_stay_in_time() -> None:
    line = [prompt(1000, 0.5), prompt(2000, 3.0), prompt(4000, 4.0), prompt(500, 5.0)]
    plan = pacer("s-edf").plan(NOW, [], [*line, *[prompt(9000, None)] * 200])
    # The first takes 0.1 s and the step 0.01 s: 0.39 s are left for other prompts, which run whole.
    assert plan.long.picked == (0, 1, 3)
    assert pacer("s-edf").plan(NOW, [], line).long.picked == (0,), "few wait for the step that it saves"


def test_prompt_that_is_just_in_time_has_its_batch_for_itself() -> None:
    """The prompt takes 0.11 s. The model counts 20 ms of that as part of a step's fixed time."""
    model = LatencyModel(replace(MODEL, flat=200))
    me = Pacer(LapsConfig(order="s-edf"), chunk_tokens=8192, layers=28, model=model)
    line = [*[prompt(500, 9.0)] * 3, *[prompt(9000, None)] * 200]
    assert me.plan(NOW, [], [prompt(1000, 0.12), *line]).long.picked == (0,)
    assert me.plan(NOW, [], [prompt(1000, 0.3), *line]).long.picked == (0, 1, 2, 3)


def test_short_requests_join_no_batch_that_they_would_make_late() -> None:
    """The prompt takes 0.11 s alone, 0.1356 s with the short request."""
    for due_s, joins in ((0.12, False), (0.13, False), (0.14, True), (None, True)):
        longs = [prompt(1000, due_s), *[prompt(9000, None)] * 200]
        plan = pacer("s-edf").plan(NOW, [Waiting(256, 0, 99.0, NOW + 5.0)], longs)
        assert plan.mixed == joins, due_s


def test_deadlines_count_from_start_of_batch_on_device() -> None:
    """A slice of the paused batch, or a batch before, still runs while the next batch is decided."""
    calm, decide = Waiting(50, 0, 99.0, NOW + 5.0), pacer("least-work").plan
    paused = Paused(0.5, 1, weight=0.1, deadlines=(NOW + 0.52,), slice_s=0.004)
    assert decide(NOW, [calm], [], paused=paused).order == (SHORT,), "0.015 s more are in time"
    assert not decide(NOW, [calm], [], paused=paused._replace(slice_s=0.01)).order
    longs = [prompt(3000, 4.0), prompt(1000, 0.2)]
    for busy_s, first in ((0.0, 1), (0.08, 1), (0.1, 0)):
        assert decide(NOW, [], longs, free_s=NOW + busy_s).long.picked[0] == first


@pytest.mark.parametrize("order", ["least-work", "s-edf"])
def test_late_prompt_runs_after_prompts_still_in_time(order: str) -> None:
    plan = pacer(order).plan(NOW, [], [prompt(400, 0.01), prompt(3000, 4.0)])
    assert plan.long.picked[0] == 1
    assert plan.account.oldest_late


def test_overtaking_prompt_owes_late_oldest_prompt_its_smaller_share() -> None:
    paused = Paused(0.5, 1, weight=1.0, deadlines=(NOW + 5.0,))
    for due_s, late in ((0.01, True), (5.0, False), (None, False)):
        plan = pacer("least-work").plan(NOW, [], [prompt(3000, due_s, 98.0), prompt(1000, 0.3)], paused=paused)
        assert (plan.order, plan.long.picked, plan.account.oldest_late) == ((LONG,), (1,), late)


def test_late_oldest_prompt_gets_smaller_guard_share() -> None:
    guard, turns = Guard(0.15), 0
    for _ in range(2000):
        oldest = guard.credit_s >= 0.5
        turns += oldest
        guard.record_batch(1.0, oldest=oldest, late=True)
    assert 0.5 * LATE * 0.15 < turns / 2000 < 1.1 * LATE * 0.15


def test_deadlines_raise_attainment_in_overload() -> None:
    """Overload with equal requests: if deadlines are known, requests that miss them do not delay others."""
    rows = tasks.jobs(32.0, 800, "8b", 1)
    objective = {job.at_s: job.slo_s or 0.0 for job in rows}

    def met(jobs: list[Job]) -> float:
        record = run("laps", Trace(jobs), Profile.load("h200-qwen3-8b")).record
        assert len(record) == len(rows), "nobody is left behind"
        return sum(t <= objective[at] for at, t in zip(record.at, record.ttft, strict=True)) / len(rows)

    assert met(rows) > met([Job(job.at_s, job.new) for job in rows]) + 0.01
