"""Quoted TTFTs: calibrated intervals, sums of waiting work, and quotes that grow with that work."""

from __future__ import annotations

import math
import random
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from laps_core.config import LapsConfig
from laps_core.latency.step import Coefficients
from laps_core.length import LONG, SHORT
from laps_core.policy.pacer import Pacer
from laps_core.receipts.backlog import SIZES, Backlog, size_of, work_s
from laps_core.receipts.calibration import FEWEST, START, Calibration, side_of
from laps_core.receipts.quote import QuoteState, bound_s, predict, quote
from laps_core.receipts.quoter import Device, Quoter
from laps_plan.sim import quoting
from laps_plan.traffic.streams import Closed, Open
from pacers import COSTS, MODELS
from simulated import CHUNK, HOST_PROFILE, MIX, PROFILE

MODEL = Coefficients(2e-9, 2e-5, 1e-9, 1e-5, 5e-3)
GUARD = LapsConfig().guard
LATE = pytest.approx(0.1 * GUARD)


def state(**more: Any) -> QuoteState:
    usual = {"model": MODEL, "threshold": 256, "chunk": 8192, "short_batch": 4096, "share": GUARD, "gap_s": 0.02}
    return QuoteState(**{**usual, **more})


# -- calibration


@pytest.mark.parametrize("drift", ["none", "steps", "ramp", "noise"])
def test_interval_covers_80_percent_despite_model_error(drift: str) -> None:
    rng, calibration, inside = random.Random(5), Calibration(), 0
    for i in range(8000):
        error = {"none": 1.0, "steps": 3.0 if i // 1000 % 2 else 0.5, "ramp": math.exp(i / 4000), "noise": 1.0}[drift]
        spread = 0.2 if drift != "noise" else 0.1 + 0.9 * (i // 500 % 2)
        low, _, high = calibration.factors("long", 0)
        measured = error * rng.lognormvariate(0.0, spread)
        side = side_of(measured, low, high)
        inside += side == "inside"
        calibration.observe("long", 0, 1.0, measured, side)
    assert 0.75 <= inside / 8000 <= 0.85


def test_new_kind_uses_family_factors_and_new_family_defaults() -> None:
    calibration = Calibration()
    assert calibration.factors("long", 3) == START
    for _ in range(FEWEST):
        calibration.observe("long", 1, 1.0, 2.0, "inside")
    assert calibration.factors("long", 3).middle == pytest.approx(2.0)
    assert calibration.factors("short", 1) == START
    calibration.observe("long", 1, 0.0, 2.0, "inside")
    calibration.observe("long", 1, 1.0, math.inf, "inside")
    assert calibration.factors("long", 1).middle == pytest.approx(2.0)


# -- sums


def test_backlog_sums_match_waiting_requests() -> None:
    rng, backlog, there = random.Random(1), Backlog(0.0), {}
    for step in range(3000):
        key = rng.randrange(60)
        if rng.random() < 0.6:
            cls = rng.choice([SHORT, LONG])
            there[key] = cls, 10.0 ** rng.uniform(-4, 1), rng.randint(1, 9000)
            backlog.set_waiting(key, *there[key])
        else:
            there.pop(key, None)
            backlog.remove(key)
        if step == 1500:
            backlog.remove_except({k for k in there if k < 30})
            there = {k: v for k, v in there.items() if k < 30}
    assert len(backlog) == len(there)
    shorts = [v for v in there.values() if v[0] == SHORT]
    assert backlog.short.requests == len(shorts)
    assert backlog.short.seconds == pytest.approx(sum(v[1] for v in shorts), abs=1e-6)
    for size in range(SIZES):
        longs = [v for v in there.values() if v[0] == LONG and size_of(v[1]) == size]
        assert backlog.long[size].tokens == sum(v[2] for v in longs)


def test_arrival_rates_cover_recent_seconds() -> None:
    backlog = Backlog(0.0)
    for i in range(600):
        backlog.count_arrival(i / 10, SHORT, 0.02, 100)
    per_s, share = backlog.short_rate(60.0)
    assert (per_s, share) == (pytest.approx(10.0, rel=0.1), pytest.approx(0.2, rel=0.1))
    assert backlog.short_rate(200.0)[0] < 0.1
    assert backlog.longest == 100


def test_chunked_work_equals_sum_of_steps() -> None:
    steps = [(4000, 500), (4000, 4500), (1000, 8500)]
    whole = sum(MODEL.work_s(*step) + MODEL.fixed for step in steps)
    assert work_s(MODEL, 9000, 500, 4000) + MODEL.fixed == pytest.approx(whole, rel=0.02)


# -- predictions


def test_prediction_for_lone_request_matches_latency_model() -> None:
    for new, cached in ((100, 3000), (5000, 0)):
        own = MODEL.work_s(new, cached) + MODEL.step_s
        assert predict(state(), new, cached).seconds == pytest.approx(own)


@pytest.mark.parametrize(
    "more",
    [
        {"left_s": 0.5},
        {"shorts": 9, "short_tokens": 9000, "short_s": 0.3},
        {"longs": ((2, 3, 0.4),)},
        {"under_way": (0.05,)},
        {"short_rate": 20.0, "short_share": 0.3},
        {"long_shares": ((2, 0.4),)},
    ],
    ids=lambda more: next(iter(more)),
)
def test_work_ahead_lengthens_long_quote(more: dict[str, Any]) -> None:
    assert predict(state(**more), 9000, 0).seconds > predict(state(), 9000, 0).seconds + 0.01


def test_larger_prompts_delay_fully_only_in_arrival_order() -> None:
    larger = ((SIZES - 1, 1, 10.0),)
    alone = predict(state(), 5000, 0).seconds
    assert predict(state(longs=larger), 5000, 0).seconds < 1.3 * alone
    assert predict(state(longs=larger, least_work=False), 5000, 0).seconds > alone + 10.0


def test_short_quote_includes_gap_but_not_sliced_batch() -> None:
    busy = state(under_way=(3.0,), left_s=0.004, gap_left_s=0.02)
    assert 0.02 < predict(busy, 50, 0).seconds < 0.05
    assert predict(state(left_s=3.0, under_way=(), layers=0, longs=((9, 1, 3.0),)), 50, 0).seconds > 3.0


def test_quote_bound_exists_only_with_guard_guarantee() -> None:
    waiting = state(longs=((20, 2, 1.5),))
    bound = bound_s(waiting, 9000, 0)
    assert bound is not None
    assert bound > 1.5 / GUARD
    for none in (state(share=0.0), state(least_work=False)):
        assert bound_s(none, 9000, 0) is None
    assert bound_s(waiting, 100, 0) is None
    found = quote(waiting, 9000, 0)
    assert found.low_ms < found.ttft_ms < found.high_ms <= (found.bound_ms or 0.0)
    assert found.cls == LONG


FREE = Coefficients(0.0, 1e-4, 0.0, 0.0, 0.0)


@given(
    model=MODELS,
    gap_s=COSTS, share=st.sampled_from([0.0, GUARD]), runs=st.booleans(), left_s=COSTS,
    longs=st.lists(st.tuples(st.integers(0, SIZES - 1), st.integers(1, 9), COSTS), max_size=3).map(tuple),
    under_way=st.lists(COSTS, max_size=2).map(tuple), shorts=st.integers(0, 90), layers=st.sampled_from([0, 36]),
    new=st.integers(1, 1 << 20), cached=st.integers(0, 1 << 20),
)  # fmt: skip
@example(
    model=FREE, gap_s=0.02, share=GUARD, runs=True, left_s=0.0, longs=(), under_way=(), shorts=0, layers=36,
    new=9000, cached=0,
)  # fmt: skip
def test_quote_is_finite_and_ordered_for_any_state(new: int, cached: int, **more: Any) -> None:
    found = quote(state(short_tokens=100 * more["shorts"], **more), new, cached)
    assert 0.0 <= found.low_ms <= found.ttft_ms <= found.high_ms < math.inf
    assert found.bound_ms is None or found.high_ms <= found.bound_ms < math.inf


def test_quote_state_round_trips() -> None:
    sent = state(longs=((3, 1, 0.2),), factors=((LONG, -1, 0.5, 2.0, 3.0),), under_way=(0.1,))
    came = msgspec.convert(msgspec.json.decode(msgspec.json.encode(sent)), QuoteState)
    assert came == sent
    assert quote(came, 9000, 10).ttft_ms == pytest.approx(2e3 * predict(sent, 9000, 10).seconds, abs=0.01)


# -- one scheduler


def quoter(**knobs: Any) -> Quoter:
    config = LapsConfig(**knobs)
    return Quoter(config, Pacer(config, chunk_tokens=8192, layers=32, model=PROFILE.model()), 0.0)


def test_unfitted_server_gives_no_quote() -> None:
    config = LapsConfig()
    assert Quoter(config, Pacer(config, chunk_tokens=8192), 0.0).quote_arrival(0.0, 1, 100, 0, SHORT, Device()) is None


def test_launched_and_gone_requests_leave_backlog() -> None:
    me = quoter()
    for key in range(3):
        assert me.quote_arrival(0.0, key, 20_000, 0, LONG, Device()) is not None
    me.record_launch(0, 12_000, 8_000)
    assert len(me.backlog) == 3
    me.record_launch(0, 0, 20_000)
    me.record_launch(1, 0, 20_000)
    me.record_launch("never came", 0, 20_000)
    assert len(me.backlog) == 1
    me.backlog.remove_except(set())
    found = me.state(1.0, Device())
    assert found is not None
    assert found.longs == ()


def test_outcomes_and_broken_bounds_are_counted() -> None:
    me = quoter()
    quoted = me.quote_arrival(10.0, 1, 5000, 0, LONG, Device(), waited_s=0.5)
    assert quoted is not None
    assert quoted.bound_s is not None
    assert quoted.low_s > 0.5
    assert me.record_outcome(10.0 + quoted.median_s - 0.5, quoted) == "inside"
    assert me.record_outcome(11.0 + quoted.bound_s, quoted) == "above"
    assert me.counts[LONG] == {"inside": 1, "below": 0, "above": 1}
    assert me.beyond_bound == 1
    found = me.state(11.0, Device(), whole=True)
    assert found is not None
    assert found.before_s == 0.5


@pytest.mark.parametrize(
    ("knobs", "share"),
    [({}, GUARD), ({"order": "fcfs"}, 0.0), ({"preset": "paper"}, 0.0), ({"ttft_slo_ms": 400.0}, LATE)],
)
def test_guaranteed_share_depends_on_config(knobs: dict[str, Any], share: float) -> None:
    found = quoter(**knobs).state(0.0, Device())
    assert found is not None
    assert found.share == share


def test_request_deadline_raises_bound_of_later_quotes() -> None:
    me = quoter()
    before = me.quote_arrival(0.0, 1, 9000, 0, LONG, Device())
    me.quote_arrival(0.0, 2, 50, 0, SHORT, Device(), due=True)
    after = me.quote_arrival(0.0, 3, 9000, 0, LONG, Device())
    assert before is not None
    assert after is not None
    assert (after.bound_s or 0.0) > 5.0 * (before.bound_s or 0.0)


# -- against the simulator


@pytest.mark.parametrize("name", ["open", "closed", "host", "learns", "whole", "paper", "due"])
def test_quoted_intervals_and_bounds_hold_in_simulation(name: str) -> None:
    workload = Closed(MIX, 24, 2500, seed=2) if name == "closed" else Open(MIX, 18.0, 2500, seed=2)
    knobs: Any = {"whole": {"slice_ms": 0.0}, "paper": {"preset": "paper"}, "due": {"ttft_slo_ms": 200.0}}.get(name, {})
    profile = HOST_PROFILE if name == "host" else PROFILE
    found = quoting.run(workload, profile, chunk=CHUNK, knobs=knobs, learn=name == "learns", overlap=name == "host")
    assert len(found) > 2400
    assert 0.75 <= quoting.inside(found) <= 0.85
    bounds = [(o.measured_s, o.quoted.bound_s) for o in found if o.quoted.bound_s is not None]
    assert bool(bounds) == (name != "paper")
    assert all(measured <= bound for measured, bound in bounds)


def test_quotes_do_not_change_decisions() -> None:
    from laps_plan.sim.variants import run

    quoted = quoting.run(Open(MIX, 18.0, 800, seed=4), PROFILE, chunk=CHUNK)
    plain = run("laps", Open(MIX, 18.0, 800, seed=4), PROFILE, chunk=CHUNK)
    assert [o.measured_s for o in quoted] == pytest.approx(list(plain.record.ttft))
