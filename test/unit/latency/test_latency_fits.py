"""Fits of the latency model run in another thread and take effect between two decisions."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from laps_core.latency.model import MIN_SAMPLES, LatencyModel
from laps_core.latency.step import StepSample
from pacers import make_pacer


def steps(n: int, first: int = 0) -> list[StepSample]:
    return [StepSample.of([(100 + 50 * (i % 12), 0)], 1e-3 + 1e-4 * (100 + 50 * (i % 12))) for i in range(first, n)]


class ManualExecutor:
    """Executor whose fits wait until ``go`` is called."""

    def __init__(self) -> None:
        self.asked: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, fn: Callable[..., Any], *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.asked.append((future, lambda: fn(*args)))
        return future

    def go(self) -> None:
        for future, made in self.asked:
            if not future.done():
                future.set_result(made())


def test_observe_does_not_wait_for_fit() -> None:
    model, elsewhere, at_once = LatencyModel(), ManualExecutor(), LatencyModel()
    model.submit = elsewhere.submit
    for step in steps(MIN_SAMPLES):
        model.observe(step)
        at_once.observe(step)
    assert (len(elsewhere.asked), model.fitted, at_once.fitted) == (1, False, True)
    for step in steps(4 * MIN_SAMPLES, MIN_SAMPLES):
        model.observe(step)
    assert (len(elsewhere.asked), model.fitted) == (1, False), "one at a time"
    elsewhere.go()
    assert not model.fitted, "nobody has taken it over"
    model.settle()
    assert model.coefficients == at_once.coefficients, "of the steps that were there when it was asked for"
    assert model.status()["why_not"] is None


def test_failed_background_fit_reports_reason() -> None:
    model, elsewhere = LatencyModel(), ManualExecutor()
    model.submit = elsewhere.submit
    for _ in range(MIN_SAMPLES):
        model.observe(StepSample.of([(100, 0)], 0.01))
    elsewhere.go()
    model.settle()
    assert "too alike" in model.status()["why_not"]
    assert not model.fitted


def test_pacer_adopts_fit_between_decisions() -> None:
    me, elsewhere = make_pacer(known=False), ManualExecutor()
    me.model.submit = elsewhere.submit
    for step in steps(MIN_SAMPLES):
        me.model.observe(step)
    elsewhere.go()
    me.status(1.0)
    assert not me.model.fitted, "asking changes nothing"
    me.record_arrivals(1.0, 0)
    assert me.model.fitted


def test_fit_can_run_in_another_thread() -> None:
    model, futures, ran_in = LatencyModel(), [], []
    with ThreadPoolExecutor(1) as pool:

        def submit(fn: Callable[..., Any], *args: Any) -> Future[Any]:
            def there() -> Any:
                ran_in.append(threading.get_ident())
                return fn(*args)

            futures.append(pool.submit(there))
            return futures[-1]

        model.submit = submit
        for step in steps(MIN_SAMPLES):
            model.observe(step)
        futures[0].result()
    model.settle()
    assert model.fitted
    assert threading.get_ident() not in ran_in
