"""Random workloads: equal for equal seeds, at the requested load, and compared with the best of stock."""

from __future__ import annotations

import random

import pytest

from benchmark.sim import anything, anything_fleet
from benchmark.sim.loads import capacity


@pytest.mark.parametrize("seed", range(3))
def test_workload_is_reproducible_and_has_requested_load(seed: int) -> None:
    profile, load, jobs = anything.workload(seed)
    again = anything.workload(seed)
    assert (profile.name, load, jobs) == (again[0].name, again[1], again[2])
    assert len(jobs) / jobs[-1].at_s == pytest.approx(load * capacity(jobs, profile))
    assert all(job.new >= 1 for job in jobs)
    assert max(job.new for job in jobs) <= anything.LONGEST


def test_ratios_divide_by_best_stock_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    def figures(name: str, chunk: int, *_: object) -> list[float]:
        return [2.0 if name == "laps" else {"fcfs": 8.0, "hrrn": 4.0}.get(name, 16.0) * (1 + (chunk == 2048))] * 5

    monkeypatch.setattr(anything, "figures", figures)
    found = anything.ratios(1)
    assert found["mean TTFT"] == 0.5
    assert found["P90 of the longest 10%"] == 0.25


def test_objectives_are_given_to_laps_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    known = dict[str, bool]()

    def late(name: str, *_: object, knows: bool = False, knobs: object = None) -> int:
        known[f"{name} {knobs or ''}"] = knows
        return 9 if name == "laps" and knows and not knobs else 19

    monkeypatch.setattr(anything, "late", late)
    found = anything.late_ratios(3)
    assert {found[name] for name in ("stock", *anything.LATE)} == {0.5}
    assert known["fcfs "] is known["hrrn "] is False
    assert known["laps {'order': 's-edf'}"]


def test_deadlines_make_fewer_requests_late() -> None:
    profile, _, jobs = anything.workload(16)
    rng = random.Random(2)
    jobs = anything.objectives(rng, profile, anything.at_rate(jobs, 1.2 * capacity(jobs, profile)))
    assert any(job.slo_s for job in jobs)
    assert anything.late("laps", 8192, profile, jobs, knows=True) <= anything.late("fcfs", 8192, profile, jobs)


def test_later_turn_of_session_has_history_of_earlier_turns() -> None:
    jobs = anything_fleet.sessions(random.Random(1), lambda _: 100, 200, 4)
    assert len(jobs) == 200
    last = dict[int, int]()
    for job in jobs:
        assert job.cached >= last.get(job.stream, 0)
        last[job.stream] = job.cached + job.new
    assert len(last) == pytest.approx(50, rel=0.4)


def test_router_is_compared_with_stock_and_with_gateway_in_front_of_laps(monkeypatch: pytest.MonkeyPatch) -> None:
    def figures(name: str, *_: object, router: str, **__: object) -> list[float]:
        return [{"pools": 2.0, "least-load": 4.0}.get(router, 8.0) * (1 + (name != "laps"))] * 5

    monkeypatch.setattr(anything_fleet, "figures", figures)
    found = anything_fleet.behind_router(1)
    assert found["mean TTFT"] == 0.25
    assert found["routers"]["P90 of the longest 10%"] == 0.5


def test_ranks_are_compared_with_best_stock_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    def figures(name: str, chunk: int, *_: object, **__: object) -> list[float]:
        return [1.0 if name == "laps" else 2.0 + (chunk > 4096)] * 5

    monkeypatch.setattr(anything_fleet, "figures", figures)
    monkeypatch.setattr(anything_fleet, "capacity", lambda *_: 100.0)
    assert anything_fleet.on_ranks(1)["mean slowdown"] == 0.5


def test_router_serves_short_prompts_as_well_as_least_load_in_front_of_laps() -> None:
    """The ratios had a mean of 1.09 when prompts were expected to wait by class instead of by work."""
    found = [anything_fleet.behind_router(seed)["routers"]["P90 of the shorter 70%"] for seed in (1, 8, 10, 14)]
    assert sum(found) / len(found) < 1.05
