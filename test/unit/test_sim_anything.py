"""Random workloads: equal for equal seeds, at the requested load, and compared with the best of stock."""

from __future__ import annotations

import pytest

from benchmark.sim import anything
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
