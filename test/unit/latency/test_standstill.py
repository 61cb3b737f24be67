"""Learning of server and router while the machine stands still for seconds, say a virtual machine that is moved."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import pytest
from laps_core.config import LapsConfig
from laps_core.latency.model import LatencyModel
from laps_core.latency.step import Coefficients
from laps_core.length import LONG, SHORT
from laps_core.policy.decode import OWED, Decode
from laps_core.policy.pacer import Pacer
from laps_core.policy.predict import STANDSTILL
from laps_core.policy.types import Account, Running
from laps_core.pools.config import AllocConfig
from laps_core.pools.controller import PoolController
from laps_core.pools.outlook import ENOUGH, Learnt
from laps_core.pools.pressure import BOTH, InstanceSignals, Work
from laps_core.receipts.quoter import Device, Quoter
from sglang_router.router_args import RouterArgs
from sglang_router_laps.servers.health import LATE_S, Health
from sglang_router_laps.servers.upstream import Sessions

MODEL = Coefficients(alpha=0.0, linear=1e-4, gamma_r=0.0, per_request=0.0, fixed=0.01)
STOOD_S = 9.0
STEP_S = 0.01


def pacer() -> Pacer:
    return Pacer(LapsConfig(), chunk_tokens=8192, layers=28, model=LatencyModel(MODEL))


def long_batch(begin: float, end: float, *, oldest: bool) -> Running:
    account = Account(oldest=oldest)
    return Running(cls=LONG, shape=[(8000, 0)], started=begin, done=end, account=account)


def test_streams_do_not_pause_for_as_long_again() -> None:
    decode = Decode(100.0)
    decode.set_streams(0.0, 4)
    for i in range(8):
        decode.record_step(i * STEP_S, (i + 1) * STEP_S, streams=4, within=False)
    begin = 8 * STEP_S
    decode.record_step(begin, begin + STEP_S + STOOD_S, streams=4, within=False)
    assert decode.owed_s(begin + STEP_S + STOOD_S) == pytest.approx(OWED * STANDSTILL * STEP_S)
    assert decode.step_s == pytest.approx(STEP_S)


def test_oldest_prompt_is_due_again_after_a_few_batches() -> None:
    me, end = pacer(), 0.81 + STOOD_S
    assert me.record_result(long_batch(0.0, end, oldest=True), None, end) == pytest.approx(STANDSTILL * 0.81)
    batches = 0
    while not me.guard.due():
        begin, end = end, end + 0.81
        me.record_result(long_batch(begin, end, oldest=False), None, end)
        batches += 1
    assert batches < 30


def bound_after_short_batch(took_s: float) -> float:
    me = pacer()
    quoter = Quoter(LapsConfig(), me, 0.0)
    batch = Running(cls=SHORT, shape=[(100, 0)], short=(0,), started=0.0, done=took_s)
    quoter.record_batch(SHORT, me.record_result(batch, None, took_s))
    found = quoter.quote_arrival(20.0, 1, 8000, 0, LONG, Device())
    assert found is not None
    assert found.bound_s is not None
    return found.bound_s


def test_bounds_of_quotes_do_not_count_standstill() -> None:
    assert bound_after_short_batch(0.02 + STOOD_S) == bound_after_short_batch(0.02)


def test_batches_before_the_first_fit_do_not_count_in_bounds() -> None:
    quoter = Quoter(LapsConfig(), Pacer(LapsConfig(), chunk_tokens=8192, layers=28), 0.0)
    quoter.record_batch(SHORT, STOOD_S)
    quoter._pacer = pacer()
    found = quoter.state(20.0, Device())
    assert found is not None
    assert found.longest_short_s == 0.0


def test_learned_model_of_servers_stays_near_the_truth() -> None:
    learned = Learnt()
    for i in range(4 * ENOUGH):
        tokens = 100 + 50 * (i % 8)
        learned.observe(tokens, seconds_of(MODEL, tokens))
    learned.observe(300, STOOD_S)
    assert seconds_of(learned.model, 300) < 1.5 * seconds_of(MODEL, 300)


def test_learned_model_follows_slower_servers() -> None:
    learned = Learnt()
    for slower in (1.0, 20.0):
        for _ in range(200 if slower > 1.0 else 20):
            learned.observe(300, slower * seconds_of(MODEL, 300))
    assert seconds_of(learned.model, 300) > 15.0 * seconds_of(MODEL, 300)


def seconds_of(model: Coefficients, tokens: int) -> float:
    return model.step_s + model.work_s(tokens, 0)


def work_of(controller: PoolController) -> float:
    return sum(controller.average_work)


def test_average_work_of_fleet_hardly_falls() -> None:
    config = AllocConfig()
    controller = PoolController(config)
    fleet = [InstanceSignals(name=str(i), pool=BOTH, busy=Work(0.4, 0.4)) for i in range(4)]
    now = 0.0
    while now < 60.0:
        now += config.sample_s
        controller.observe(now, fleet)
    before = work_of(controller)
    controller.observe(now + 30.0, [replace(s, busy=Work()) for s in fleet])
    assert 0.0 < 0.85 * before < work_of(controller)


@pytest.mark.parametrize(
    ("wakes_in_s", "late_since_s", "stood_still"),
    [
        (math.inf, math.inf, False),
        (0.4, math.inf, False),
        (-LATE_S - 0.1, math.inf, True),
        (0.4, 0.1, True),
        (0.4, 2 * LATE_S + 0.1, False),
    ],
    ids=["not-started", "in-time", "late-now", "late-before", "late-long-ago"],
)
def test_router_knows_that_it_stood_still(wakes_in_s: float, late_since_s: float, stood_still: bool) -> None:
    found = Health(Sessions(), RouterArgs())
    now = time.monotonic()
    found._wakes_at, found._late_at = now + wakes_in_s, now - late_since_s
    assert found.stood_still is stood_still
