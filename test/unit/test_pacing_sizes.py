"""Sizes of the pacer's batches: chunks, units, slices, and steps that cannot be paused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from laps_core.config import ConfigError, LapsConfig
from laps_core.latency.step import Coefficients
from laps_core.length import LONG
from laps_core.policy.pacer import Pacer
from pacers import CHUNK, GAP, KNOWN, LAYERS, TOKEN, F, ended, launch, long, pacer, paused, short


def test_a_batch_stays_within_the_chunk_and_what_preempts_within_half() -> None:
    many = [short(i, 200) for i in range(50)]
    me = pacer(chunk=1024)
    assert me.plan(1.0, many, []).picked == (0, 1, 2, 3, 4)
    assert me.plan(1.0, many, [long(5000)]).picked == (0, 1, 2, 3, 4)
    assert me.plan(1.0, many, [], paused=paused()).picked == (0, 1), "beside the activations of what is paused"
    assert me.plan(1.0, [short("a", 256)], [], paused=paused()).picked == (0,)
    assert len(pacer(chunk=None).plan(1.0, many, [], paused=paused()).picked) == 40, "nor is it more where none is cut"
    assert len(pacer(chunk=None, batch_tokens=4000).plan(1.0, many, [], paused=paused()).picked) == 10
    small = pacer(chunk=300).plan(1.0, [short("a", 256), short("b", 256)], [], paused=paused())
    assert small.picked == (0,), "a short request fits, whatever the half"


def test_a_long_batch_is_whole_units() -> None:
    me = pacer(chunk=1000, unit=64)
    assert me.plan(0.0, [], [long(5000)]).long.tokens == 960
    assert me.plan(0.0, [], [long(300)]).long.tokens == 320
    assert pacer(chunk=None).plan(0.0, [], [long(5000)]).long.tokens == 0
    assert pacer(chunk=1024).plan(0.0, [], [long(1 << 20)]).long.tokens == 1024


def test_a_chunk_that_holds_no_unit_is_refused() -> None:
    with pytest.raises(ConfigError, match="32 is less than 64 tokens"):
        pacer(chunk=32, unit=64)
    assert pacer(chunk=64, unit=64).plan(0.0, [], [long(5000)]).long.tokens == 64


def test_a_lone_long_prompt_goes_chunk_after_chunk() -> None:
    me, done = pacer(chunk=1024, layers=0), 0
    while done < 5000:
        plan = me.plan(float(done), [], [long(5000, done=done)])
        assert (plan.order, plan.long.picked) == ((LONG,), (0,))
        done += plan.long.tokens
    assert done == 5000


def test_a_batch_that_the_host_could_not_keep_up_with_runs_whole() -> None:
    me = pacer()
    tokens = 2000
    took = F + tokens * TOKEN
    assert me.plan(0.0, [], [long(tokens)]).long.layers > 0
    me.sizes.launch_s = 0.51 * took
    assert me.plan(0.0, [], [long(tokens)]).long.layers == 0
    assert me.plan(0.0, [], [long(2 * tokens)]).long.layers > 0


def test_pauses_cost_a_fiftieth_of_a_pass_and_a_slice_takes_at_most_sixteen_times_as_long() -> None:
    me, waits = pacer(), [long(20_000)]
    layer_s = (F + CHUNK * TOKEN) / LAYERS
    for pause_s in (0.0, 1e-4, 1e-3, 1.2e-3, 1e-2, 1.0):
        me.sizes.pause_s = pause_s
        plan = me.plan(0.0, [], waits)
        slice_s = layer_s * plan.long.layers / plan.long.parts
        assert slice_s <= 16 * 4e-3, "whatever a pause costs"
        assert pause_s > 16 * 4e-3 * 0.02 or pause_s <= 2 * 0.02 * slice_s, "parts of a layer are whole numbers"
    never = pacer(slice_ms=0.01)
    never.sizes.pause_s = 1.0
    plan = never.plan(0.0, [], waits)
    assert plan.long.layers == 1
    assert plan.long.parts > 16, "who asks for the finest slices gets them"


def test_slices_take_their_time_from_the_model() -> None:
    me = pacer()
    took = F + CHUNK * TOKEN
    plan = me.plan(0.0, [], [long(20_000)])
    assert plan.long.layers == max(1, int(4e-3 / (took / LAYERS)))
    assert pacer(slice_ms=50.0).plan(0.0, [], [long(20_000)]).long.layers == int(50e-3 / (took / LAYERS))
    assert pacer(slice_ms=1000.0).plan(0.0, [], [long(20_000)]).long.layers == 0, "two slices are not worth a pause"
    assert me.plan(0.0, [], [long(100)]).long.layers == 0
    assert pacer(known=False).plan(0.0, [], [long(20_000)]).long.layers == 1, "nothing is known: as often as it can be"
    assert pacer(layers=0).plan(0.0, [], [long(20_000)]).long.layers == 0
    whole = pacer(slice_ms=6.0)
    assert whole.plan(0.0, [], [long(280)]).long.layers == 0
    assert whole.plan(0.0, [], [long(281)]).long.layers > 0


def test_without_slices_a_chunk_takes_no_longer_than_the_gap() -> None:
    me = pacer(layers=0)
    tokens = me.plan(0.0, [], [long(20_000)]).long.tokens
    assert tokens == int(GAP / TOKEN)
    assert pacer(layers=0, unit=64).plan(0.0, [], [long(20_000)]).long.tokens == tokens // 64 * 64
    assert pacer(layers=0, unit=4096).plan(0.0, [], [long(20_000)]).long.tokens == 4096, "one unit at least"
    assert pacer(layers=0, known=False).plan(0.0, [], [long(20_000)]).long.tokens == CHUNK
    assert pacer(layers=0, preempt_overhead=0.01).plan(0.0, [], [long(20_000)]).long.tokens == CHUNK
    slow = pacer(layers=0)
    model: Any = slow.model
    model.predict = lambda requests: F + sum(TOKEN * n + 1e-9 * n * (n + 2 * h) for n, h in requests)
    tokens = slow.plan(0.0, [], [long(200_000, done=100_000)]).long.tokens
    assert model.predict([(tokens, 100_000)]) - F <= GAP < model.predict([(tokens + 1, 100_000)]) - F


def test_a_long_history_does_not_make_for_tiny_chunks() -> None:
    """If re-reading the history takes longer than the gap, the chunk's work takes as long as that, not one token."""
    history = 100_000
    costs = Coefficients(0.0, TOKEN, 1e-6, 0.0, F)
    me = Pacer(LapsConfig(), chunk_tokens=CHUNK, model=replace(KNOWN, coefficients=costs).model())
    least_s = F + 1e-6 * history
    assert least_s > GAP
    assert me.plan(0.0, [], [long(200_000, done=history)]).long.tokens == pytest.approx(least_s / TOKEN, abs=1)


def test_without_slices_short_requests_share_the_step() -> None:
    me = pacer(layers=0)
    plan = me.plan(1.0, [short("a"), short("b", 100)], [long(20_000)])
    assert plan.mixed
    assert (plan.order[0], plan.picked, plan.long.picked) == (LONG, (0, 1), (0,))
    assert plan.long.tokens == int(GAP / TOKEN) + 150
    paged = pacer(layers=0, unit=64, preempt_overhead=1.0).plan(1.0, [short("a", 1), short("b", 65)], [long(20_000)])
    assert paged.long.tokens == int(F / TOKEN) // 64 * 64 + 64 + 128, "each begins a page of its own"
    assert not me.plan(1.0, [], [long(20_000)]).mixed
    assert not pacer().plan(1.0, [short("a")], [long(20_000)]).mixed
    assert pacer(layers=0, chunk=1024).plan(1.0, [short("a", 250)], [long(20_000)]).long.tokens == 1024


def test_a_shared_step_counts_for_both() -> None:
    me = pacer(layers=0)
    plan = me.plan(1.0, [short("a"), short("b")], [long(20_000)])
    sent = launch(me, 1.0, plan)
    assert (sent.cls, sent.preempts, len(sent.short)) == (LONG, False, 2)
    ended(me, sent, 1.0, 1.1)
    assert sum(me.status(2.0)["window"]["dispatched"].values()) == 1


def test_without_slices_short_requests_leave_the_chunk_half_of_the_step() -> None:
    crowd = [short(i, 256) for i in range(64)]
    plan = pacer(layers=0).plan(1.0, crowd, [long(9000)])
    assert plan.mixed
    joining = sum(256 for _ in plan.picked)
    assert 0 < joining <= CHUNK // 2
    assert plan.long.tokens > joining
