"""Sizes of the pacer's batches: chunks, units, slices, and steps that cannot be paused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from laps_core.config import ConfigError, LapsConfig
from laps_core.latency.step import Coefficients
from laps_core.length import LONG
from laps_core.policy.pacer import Pacer
from pacers import (
    CHUNK,
    FIXED_S,
    GAP,
    LAYERS,
    PROFILE,
    TOKEN_S,
    end_batch,
    launch_batch,
    long_prompt,
    make_pacer,
    paused_prompt,
    short_prompt,
)


def test_batch_fits_chunk_and_preempting_batch_fits_half() -> None:
    many = [short_prompt(i, 200) for i in range(50)]
    pacer = make_pacer(chunk=1024)
    assert pacer.plan(1.0, many, []).picked == (0, 1, 2, 3, 4)
    assert pacer.plan(1.0, many, [long_prompt(5000)]).picked == (0, 1, 2, 3, 4)
    assert pacer.plan(1.0, many, [], paused=paused_prompt()).picked == (0, 1), (
        "beside the activations of what is paused"
    )
    assert pacer.plan(1.0, [short_prompt("a", 256)], [], paused=paused_prompt()).picked == (0,)
    assert len(make_pacer(chunk=None).plan(1.0, many, [], paused=paused_prompt()).picked) == 40, (
        "nor is it more where none is cut"
    )
    assert len(make_pacer(chunk=None, batch_tokens=4000).plan(1.0, many, [], paused=paused_prompt()).picked) == 10
    small = make_pacer(chunk=300).plan(
        1.0, [short_prompt("a", 256), short_prompt("b", 256)], [], paused=paused_prompt()
    )
    assert small.picked == (0,), "a short request fits, whatever the half"


def test_long_batch_is_multiple_of_unit() -> None:
    pacer = make_pacer(chunk=1000, unit=64)
    assert pacer.plan(0.0, [], [long_prompt(5000)]).long.tokens == 960
    assert pacer.plan(0.0, [], [long_prompt(300)]).long.tokens == 320
    assert make_pacer(chunk=None).plan(0.0, [], [long_prompt(5000)]).long.tokens == 0
    assert make_pacer(chunk=1024).plan(0.0, [], [long_prompt(1 << 20)]).long.tokens == 1024


def test_long_batch_holds_whole_pages_of_each_prompt() -> None:
    """Else SGLang would cut the last prompt, which would then need a step for its rest."""
    pacer = make_pacer(chunk=4096, unit=64)
    plan = pacer.plan(0.0, [], [long_prompt(257)] * 4)
    assert (plan.long.picked, plan.long.tokens) == ((0, 1, 2), 3 * 320)


def test_chunk_smaller_than_unit_is_rejected() -> None:
    with pytest.raises(ConfigError, match="32 is less than 64 tokens"):
        make_pacer(chunk=32, unit=64)
    assert make_pacer(chunk=64, unit=64).plan(0.0, [], [long_prompt(5000)]).long.tokens == 64


def test_lone_long_prompt_runs_chunk_by_chunk() -> None:
    pacer, done = make_pacer(chunk=1024, layers=0), 0
    while done < 5000:
        plan = pacer.plan(float(done), [], [long_prompt(5000, done=done)])
        assert (plan.order, plan.long.picked) == ((LONG,), (0,))
        done += plan.long.tokens
    assert done == 5000


def test_batch_runs_whole_if_host_launches_too_slowly() -> None:
    pacer = make_pacer()
    tokens = 2000
    took = FIXED_S + tokens * TOKEN_S
    assert pacer.plan(0.0, [], [long_prompt(tokens)]).long.layers > 0
    pacer.sizes.launch_s = 0.51 * took
    assert pacer.plan(0.0, [], [long_prompt(tokens)]).long.layers == 0
    assert pacer.plan(0.0, [], [long_prompt(2 * tokens)]).long.layers > 0


def test_slices_lengthen_with_pause_cost_up_to_limit() -> None:
    pacer, waits = make_pacer(), [long_prompt(20_000)]
    layer_s = (FIXED_S + CHUNK * TOKEN_S) / LAYERS
    for pause_s in (0.0, 1e-4, 1e-3, 1.2e-3, 1e-2, 1.0):
        pacer.sizes.pause_s = pause_s
        plan = pacer.plan(0.0, [], waits)
        slice_s = layer_s * plan.long.layers / plan.long.parts
        assert slice_s <= 16 * 4e-3, "whatever a pause costs"
        assert pause_s > 16 * 4e-3 * 0.02 or pause_s <= 2 * 0.02 * slice_s, "parts of a layer are whole numbers"
    never = make_pacer(slice_ms=0.01)
    never.sizes.pause_s = 1.0
    plan = never.plan(0.0, [], waits)
    assert plan.long.layers == 1
    assert plan.long.parts > 16, "who asks for the finest slices gets them"


def test_slice_length_follows_latency_model() -> None:
    pacer = make_pacer()
    took = FIXED_S + CHUNK * TOKEN_S
    plan = pacer.plan(0.0, [], [long_prompt(20_000)])
    assert plan.long.layers == max(1, int(4e-3 / (took / LAYERS)))
    assert make_pacer(slice_ms=50.0).plan(0.0, [], [long_prompt(20_000)]).long.layers == int(50e-3 / (took / LAYERS))
    assert make_pacer(slice_ms=1000.0).plan(0.0, [], [long_prompt(20_000)]).long.layers == 0, (
        "two slices are not worth a pause"
    )
    assert pacer.plan(0.0, [], [long_prompt(100)]).long.layers == 0
    assert make_pacer(known=False).plan(0.0, [], [long_prompt(20_000)]).long.layers == 1, (
        "nothing is known: as often as it can be"
    )
    assert make_pacer(layers=0).plan(0.0, [], [long_prompt(20_000)]).long.layers == 0
    whole = make_pacer(slice_ms=6.0)
    assert whole.plan(0.0, [], [long_prompt(280)]).long.layers == 0
    assert whole.plan(0.0, [], [long_prompt(281)]).long.layers > 0


def test_chunk_without_slices_takes_at_most_gap() -> None:
    pacer = make_pacer(layers=0)
    tokens = pacer.plan(0.0, [], [long_prompt(20_000)]).long.tokens
    assert tokens == int(GAP / TOKEN_S)
    assert make_pacer(layers=0, unit=64).plan(0.0, [], [long_prompt(20_000)]).long.tokens == tokens // 64 * 64
    assert make_pacer(layers=0, unit=4096).plan(0.0, [], [long_prompt(20_000)]).long.tokens == 4096, "one unit at least"
    assert make_pacer(layers=0, known=False).plan(0.0, [], [long_prompt(20_000)]).long.tokens == CHUNK
    assert make_pacer(layers=0, preempt_overhead=0.01).plan(0.0, [], [long_prompt(20_000)]).long.tokens == CHUNK
    slow = make_pacer(layers=0)
    model: Any = slow.model
    model.predict = lambda requests: FIXED_S + sum(TOKEN_S * n + 1e-9 * n * (n + 2 * h) for n, h in requests)
    tokens = slow.plan(0.0, [], [long_prompt(200_000, done=100_000)]).long.tokens
    assert model.predict([(tokens, 100_000)]) - FIXED_S <= GAP < model.predict([(tokens + 1, 100_000)]) - FIXED_S


def test_chunk_stays_large_with_long_history() -> None:
    """If re-reading the history takes longer than the gap, the chunk's work takes as long as that, not one token."""
    history = 100_000
    costs = Coefficients(0.0, TOKEN_S, 1e-6, 0.0, FIXED_S)
    pacer = Pacer(LapsConfig(), chunk_tokens=CHUNK, model=replace(PROFILE, coefficients=costs).model())
    least_s = FIXED_S + 1e-6 * history
    assert least_s > GAP
    assert pacer.plan(0.0, [], [long_prompt(200_000, done=history)]).long.tokens == pytest.approx(
        least_s / TOKEN_S, abs=1
    )


def test_short_requests_share_step_without_slices() -> None:
    pacer = make_pacer(layers=0)
    plan = pacer.plan(1.0, [short_prompt("a"), short_prompt("b", 100)], [long_prompt(20_000)])
    assert plan.mixed
    assert (plan.order[0], plan.picked, plan.long.picked) == (LONG, (0, 1), (0,))
    assert plan.long.tokens == int(GAP / TOKEN_S) + 150
    paged = make_pacer(layers=0, unit=64, preempt_overhead=1.0).plan(
        1.0, [short_prompt("a", 1), short_prompt("b", 65)], [long_prompt(20_000)]
    )
    assert paged.long.tokens == int(FIXED_S / TOKEN_S) // 64 * 64 + 64 + 128, "each begins a page of its own"
    assert not pacer.plan(1.0, [], [long_prompt(20_000)]).mixed
    assert not make_pacer().plan(1.0, [short_prompt("a")], [long_prompt(20_000)]).mixed
    assert (
        make_pacer(layers=0, chunk=1024).plan(1.0, [short_prompt("a", 250)], [long_prompt(20_000)]).long.tokens == 1024
    )


def test_shared_step_counts_for_both_classes() -> None:
    pacer = make_pacer(layers=0)
    plan = pacer.plan(1.0, [short_prompt("a"), short_prompt("b")], [long_prompt(20_000)])
    sent = launch_batch(pacer, 1.0, plan)
    assert (sent.cls, sent.preempts, len(sent.short)) == (LONG, False, 2)
    end_batch(pacer, sent, 1.0, 1.1)
    assert sum(pacer.status(2.0)["window"]["dispatched"].values()) == 1


def test_short_requests_leave_half_of_step_for_chunk() -> None:
    crowd = [short_prompt(i, 256) for i in range(64)]
    plan = make_pacer(layers=0).plan(1.0, crowd, [long_prompt(9000)])
    assert plan.mixed
    joining = sum(256 for _ in plan.picked)
    assert 0 < joining <= CHUNK // 2
    assert plan.long.tokens > joining
