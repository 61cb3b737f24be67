"""The simulator compared with the queueing formula and Lindley's recursion, for one queue and one server."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from laps_plan.sim.device import Device
from laps_plan.sim.engine import Events, Server, simulate
from laps_plan.sim.fleet import Single
from laps_plan.sim.request import Request
from laps_plan.sim.stock import Fcfs
from laps_plan.traffic.job import Job
from simulated import PROFILE


class PoissonArrivals:
    """Poisson arrivals; the formula uses the sample's own rate and moments, which cancels most sampling noise."""

    follows = False

    def __init__(self, utilisation: float, n: int) -> None:
        rng = random.Random(11)
        c = PROFILE.coefficients
        sizes = [40 if rng.random() < 0.8 else 900 for _ in range(n)]
        service = [c.alpha * s * s + c.linear * s + c.per_request + c.fixed for s in sizes]
        mean = sum(service) / n
        gaps = [rng.expovariate(1.0) for _ in range(n)]
        scale = mean / utilisation / (sum(gaps) / n)
        self.gaps = [g * scale for g in gaps]
        self.sizes = sizes
        second = sum(s * s for s in service) / n
        self.expected = utilisation / mean * second / (2.0 * (1.0 - utilisation))

    def arrivals(self) -> Iterator[Job]:
        at = 0.0
        for i, (gap, size) in enumerate(zip(self.gaps, self.sizes, strict=True)):
            at += gap
            yield Job(at, size, number=i)

    def answered(self, now: float, job: Job) -> None:
        return None


class OneByOne(Fcfs):
    """FCFS in which no two requests share a batch."""

    def _sort(self, room: int) -> None:
        self._free = True

    def _may_start(self, request: Request, room: int) -> bool:
        free, self._free = self._free, False
        return free


@pytest.mark.parametrize("utilisation", [0.3, 0.5, 0.7])
def test_mean_wait_matches_pollaczek_khinchine_formula(utilisation: float) -> None:
    workload = PoissonArrivals(utilisation, 200_000)
    events = Events()
    server = Server("one", OneByOne(None), Device(PROFILE), events)
    outcome = simulate(workload, Single([server]), events)
    mean = sum(outcome.record.wait) / len(outcome.record)
    assert mean == pytest.approx(workload.expected, rel=0.02)
    assert outcome.busy_s[0] / outcome.seconds == pytest.approx(utilisation, rel=0.01)


def test_waits_equal_lindleys_recursion() -> None:
    workload = PoissonArrivals(0.8, 2000)
    events = Events()
    outcome = simulate(workload, Single([Server("one", OneByOne(None), Device(PROFILE), events)]), events)
    c, free, at = PROFILE.coefficients, 0.0, 0.0
    for gap, size, wait in zip(workload.gaps, workload.sizes, outcome.record.wait, strict=True):
        at += gap
        begin = max(at, free)
        assert wait == pytest.approx(begin - at, abs=1e-5)
        free = begin + c.alpha * size * size + c.linear * size + c.per_request + c.fixed
