"""Precedence of decode steps over prompts, and the share of time that prompts always keep."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from laps_core.latency.model import LatencyModel
from laps_core.latency.step import Coefficients
from laps_core.length import LONG, SHORT
from laps_core.policy.decode import LEAST_TARGET_S, PROMPT_SHARE, TIMES, Decode
from laps_core.policy.fairness import Guard
from laps_core.policy.predict import Sizes
from laps_core.policy.types import Account, DecodeStep, LongBatch, Paused, Plan, Waiting

TOKEN_S = 1e-4
"""Time of a prompt token (seconds); a prefill step costs nothing else."""
STEP_S = 0.01


class WeightReadingDevice(Coefficients):
    """Device whose decode step takes as long as reading the weights, which a prefill step hides."""

    step_s = STEP_S


def sizes(
    *, fitted: bool = True, layers: int = 10, chunk: int = 4096, reads: type[Coefficients] = WeightReadingDevice
) -> Sizes:
    model = LatencyModel(reads(0.0, TOKEN_S, 0.0, 0.0, 0.0) if fitted else None)
    return Sizes(model, chunk_tokens=chunk, unit=1, layers=layers, slice_s=0.004)


def waiting(*tokens: int) -> list[Waiting]:
    return [Waiting(n, 0, 0.0, None, n) for n in tokens]


def paused(slice_s: float = 0.004) -> Paused:
    return Paused(1.0, 1, 1, slice_s=slice_s)


def decode(target_ms: float | None = 100.0, *, ended_s: float = 0.0) -> Decode:
    """Return a Decode with four streams whose last step, of STEP_S, ended at ``ended_s``."""
    made = Decode(target_ms)
    made.set_streams(ended_s - STEP_S, 4)
    made.record_launch()
    made.record_step(ended_s - STEP_S, ended_s, streams=4, within=False)
    return made


def test_target_is_derived_from_step_time() -> None:
    assert Decode(None).target_s == LEAST_TARGET_S
    assert decode(None).target_s == LEAST_TARGET_S
    slow = Decode(None)
    slow.record_step(0.0, 0.2, streams=1, within=False)
    assert slow.target_s == pytest.approx(TIMES * 0.2)
    assert Decode(70.0).target_s == pytest.approx(0.07)
    assert math.isinf(Decode(0.0).target_s)


def test_step_time_adapts_to_recent_steps() -> None:
    made = Decode(None)
    for i in range(200):
        made.record_step(i, i + (0.01 if i < 100 else 0.03), streams=1, within=False)
    assert made.step_s == pytest.approx(0.03)


@pytest.mark.parametrize(("now", "goes"), [(0.080, False), (0.0849, False), (0.0871, True), (0.5, True)])
def test_decode_step_in_pause_runs_as_late_as_possible(now: float, goes: bool) -> None:
    """Latest start: 0.1 s after the last step, minus a step and the next slice."""
    plan = decode().adjust_plan(now, Plan(()), [], [], paused(), sizes())
    assert (plan.decode == "first", plan.order) == (goes, ())


@pytest.mark.parametrize("streams", [0, 4])
def test_no_decode_step_is_due_without_streams_or_target(streams: int) -> None:
    made = decode(0.0 if streams else 100.0)
    made.set_streams(5.0, streams)
    assert made.adjust_plan(9.0, Plan(()), [], [], paused(), sizes()).decode != "first"


def test_target_of_new_streams_counts_from_their_start() -> None:
    made = decode()
    made.set_streams(1.0, 0)
    made.set_streams(7.0, 2)
    assert made.adjust_plan(7.05, Plan(()), [], [], paused(), sizes()).decode != "first"
    assert made.adjust_plan(7.09, Plan(()), [], [], paused(), sizes()).decode == "first"


def test_no_second_decode_step_is_due_while_one_runs() -> None:
    made = decode()
    made.record_launch()
    assert made.adjust_plan(9.0, Plan(()), [], [], paused(), sizes()).decode != "first"


def test_separate_step_runs_from_launch_until_its_result() -> None:
    made = decode(ended_s=0.0)
    assert made.running is None
    made.record_launch(1.0)
    assert made.running == DecodeStep(1.0, STEP_S)
    made.record_launch(1.005)
    made.record_step(1.0, 1.01, streams=4, within=False)
    assert made.running == DecodeStep(1.005, made.step_s), "launched before the result of the last one"
    made.record_step(1.01, 1.02, streams=4, within=False)
    made.record_launch()
    assert made.running is None, "a prefill batch carries the step"


def test_no_decode_step_is_planned_without_prompts() -> None:
    assert decode().adjust_plan(9.0, Plan(()), [], [], None, sizes()).decode != "first"


@pytest.mark.parametrize(
    ("tokens", "layers", "goes"), [(400, 0, False), (900, 0, True), (4000, 1, False), (4000, 5, True)]
)
def test_sliced_long_batch_counts_only_until_first_pause(tokens: int, layers: int, goes: bool) -> None:
    plan = Plan((LONG,), long=LongBatch((0,), tokens, layers))
    made = decode().adjust_plan(0.045, plan, [], waiting(tokens), None, sizes())
    assert (made.decode == "first") == goes
    assert made.order == (() if goes else (LONG,))


def test_short_batch_is_split_only_if_too_long() -> None:
    shorts = waiting(100, 100, 100, 100)
    plan = Plan((SHORT,), picked=(2, 0, 1, 3), account=Account(contended=True))
    assert decode().adjust_plan(0.03, plan, shorts, [], paused(), sizes()) == plan
    split = decode().adjust_plan(0.0555, plan, shorts, [], paused(), sizes())
    assert (split.picked, split.split, split.order) == ((2, 0, 1), True, (SHORT,))


def test_oversized_short_batch_waits_for_decode_step_then_runs() -> None:
    shorts, plan = waiting(2000, 100), Plan((SHORT,), picked=(0, 1))
    assert decode().adjust_plan(0.03, plan, shorts, [], paused(), sizes()).decode == "first"
    after = decode().adjust_plan(0.001, plan, shorts, [], paused(), sizes())
    assert (after.decode == "first", after.picked) == (False, (0,)), (
        "prompts have not had their share since the last step"
    )


ROW_S = TOKEN_S
"""Time of a stream's row in a prefill batch (seconds)."""


def plan_carrying_rows(
    now: float, plan: Plan, *, context: int | None = 400, streams: int = 4, chunk: int = 4096, **more: Any
) -> Plan:
    """Return the adjusted plan of a server with streams whose last step ended at 0 and whose target is 0.1 s."""
    made, shorts, longs = decode(), more.get("shorts", ()), more.get("longs", ())
    made.set_streams(now, streams, context)
    return made.adjust_plan(now, plan, waiting(*shorts), waiting(*longs), more.get("beside"), sizes(chunk=chunk))


def test_short_batch_carries_decode_rows_with_or_without_pause() -> None:
    plan = Plan((SHORT,), picked=(1, 0), account=Account(contended=True))
    for beside in (None, paused()):
        assert plan_carrying_rows(0.03, plan, shorts=(100, 100), beside=beside) == plan._replace(decode="carried")
    assert plan_carrying_rows(0.03, plan, shorts=(100, 100), context=None).decode != "carried", (
        "SGLang mixes none of these"
    )
    assert plan_carrying_rows(0.03, plan, shorts=(100, 100), streams=0).decode != "carried"
    assert plan_carrying_rows(0.03, plan, shorts=(100, 100), streams=120).decode != "carried", (
        "rows of 12 ms, and a step takes 10"
    )
    assert plan_carrying_rows(0.03, plan, shorts=(100, 100), chunk=202).decode != "carried", (
        "more tokens than a batch may have"
    )


def test_row_time_covers_step_time_except_weight_read() -> None:
    """The rest of a step is for contexts: a step reads the context of each stream, a prefill once for many tokens."""
    made = decode()
    made.set_streams(0.0, 4, 400_000)
    assert made.rows_s(sizes()) == pytest.approx(4 * ROW_S)
    assert made.rows_s(sizes(reads=Coefficients)) == pytest.approx(STEP_S)


def test_short_batch_is_split_so_carried_rows_meet_target() -> None:
    """Tokens are due at 0.1 s. Rows save a step, and prompts may use its time: as many run as end by then."""
    plan = Plan((SHORT,), picked=(0, 1, 2))
    split = plan_carrying_rows(0.0705, plan, shorts=(100, 100, 100), beside=paused())
    assert (split.decode == "carried", split.picked, split.split) == (True, (0, 1), True)
    late = plan_carrying_rows(0.0905, plan, shorts=(100, 100, 100), beside=paused())
    assert late.decode == "first"


def test_only_unsliced_long_batch_carries_decode_rows() -> None:
    whole, sliced = (Plan((LONG,), long=LongBatch((0,), 900, layers)) for layers in (0, 1))
    assert plan_carrying_rows(0.005, whole, longs=(900,)) == whole._replace(decode="carried")
    assert plan_carrying_rows(0.005, sliced, longs=(900,)) == sliced
    assert plan_carrying_rows(0.02, whole, longs=(900,)).decode == "first", "it would end too late"


@pytest.mark.parametrize(
    ("now", "shorts", "picked", "split"),
    [
        (0.02, (100, 100), (1, 0), False),
        (0.02, (100, 400), (), False),
        (0.04, (100, 100), (1,), True),
        (0.06, (100, 100), (), False),
    ],
    ids=["both", "too long", "one", "late"],
)
def test_short_batch_runs_beside_rows_only_if_they_stay_in_time(
    now: float, shorts: tuple[int, ...], picked: tuple[int, ...], split: bool
) -> None:
    """The rows' tokens are due at 100 ms; the paused batch needs 40 ms, after a slice of 4 ms."""
    beside = Paused(0.04, 1, slice_s=0.004, rows=True)
    plan = plan_carrying_rows(now, Plan((SHORT,), picked=(1, 0)), shorts=shorts, beside=beside)
    assert (plan.order, plan.picked, plan.split) == ((SHORT,) if picked else (), picked, split)
    assert not plan.decode, "their step has not ended"


def test_no_long_prompt_overtakes_batch_with_rows() -> None:
    plan = Plan((LONG,), long=LongBatch((0,), 900))
    assert not plan_carrying_rows(0.0, plan, longs=(900,), beside=Paused(0.001, 1, rows=True)).order


def test_prompts_get_their_share_before_rows_are_carried() -> None:
    plan = Plan((SHORT,), picked=(0,))
    assert plan_carrying_rows(0.0, plan, shorts=(40,), streams=80).decode != "carried", (
        "rows of 8 ms in a batch of 4 ms"
    )
    assert plan_carrying_rows(0.0, plan, shorts=(90,), streams=80).decode == "carried"
    assert plan_carrying_rows(0.01, plan, shorts=(40,), streams=80).decode == "carried"


def test_due_decode_step_includes_held_short_requests() -> None:
    plan = Plan((), picked=(1, 0), account=Account(contended=True))
    due = plan_carrying_rows(0.0871, plan, shorts=(40, 40), beside=paused())
    assert (due.order, due.picked, due.decode, due.split) == ((SHORT,), (1, 0), "carried", True)
    assert not due.account.contended, "it costs no step: the next preemption does not wait for it"
    assert plan_carrying_rows(0.08, plan, shorts=(40, 40), beside=paused()) == plan, "not due yet"
    longer = plan_carrying_rows(0.0866, plan, shorts=(100, 100), beside=paused())
    assert (longer.picked, longer.decode) == ((1,), "carried"), "twice the time of a step, at most"
    assert plan_carrying_rows(0.0871, plan, shorts=(300, 300), beside=paused()).decode == "first"
    assert plan_carrying_rows(0.0871, plan, shorts=(40, 40), context=None, beside=paused()).decode == "first"


def test_mixed_decode_step_starts_early_enough_for_target() -> None:
    """Step and short requests take 18.4 ms, so they must start by 81.6 ms; the next slice would end after that."""
    plan = Plan((), picked=(0,), account=Account(contended=True))
    assert plan_carrying_rows(0.077, plan, shorts=(180,), beside=paused()) == plan
    assert plan_carrying_rows(0.078, plan, shorts=(180,), beside=paused()).decode == "carried"


def test_carried_rows_count_as_finished_decode_step() -> None:
    made = decode()
    made.set_streams(0.05, 4, 400)
    made.record_launch()
    made.record_step(0.05, 0.09, streams=4, within=True, rows_s=0.0004)
    counted = made.statistics
    assert (counted.steps, counted.within, counted.carried) == (2, 1, 1)
    assert (made.step_s, counted.busy_s) == (STEP_S, STEP_S), "of steps of their own alone"
    assert made.may_step(0.09)
    assert made.time_to_next_step_s(0.09) == pytest.approx(0.1 - STEP_S)
    assert made.status()["steps_carried"] == 1


def test_unknown_prefill_time_splits_no_batch() -> None:
    plan = Plan((SHORT,), picked=(0, 1))
    assert decode().adjust_plan(0.03, plan, waiting(200, 200), [], paused(0.0), sizes(fitted=False)) == plan


@settings(max_examples=200)
@given(
    st.integers(0, 1 << 30),
    st.one_of(st.none(), st.floats(0.1, 500.0)),
    st.floats(0.001, 0.2),
    st.floats(0.0005, 0.05),
)
def test_prompts_keep_their_share_for_any_decode_target(
    seed: int, target_ms: float | None, step_s: float, slice_s: float
) -> None:
    rng, made, now = random.Random(seed), Decode(target_ms), 0.0
    made.set_streams(now, 64)
    log: list[tuple[bool, float]] = []
    for _ in range(150):
        steps = made.adjust_plan(now, Plan(()), [], [], paused(slice_s), sizes()).decode == "first"
        took = (step_s if steps else slice_s) * rng.uniform(0.5, 2.0)
        if steps:
            made.record_launch()
            made.record_step(now, now + took, streams=64, within=True)
        log.append((steps, took))
        now += took
    longest = max((took for steps, took in log if steps), default=0.0)
    for i in range(0, 150, 11):
        for j in range(i + 1, 151, 7):
            prompts = sum(took for steps, took in log[i:j] if not steps)
            assert prompts >= PROMPT_SHARE * (sum(took for _, took in log[i:j])) - longest - 1e-9


@settings(max_examples=100)
@given(st.integers(0, 1 << 30), st.one_of(st.none(), st.floats(0.1, 500.0)), st.integers(1, 400))
def test_prompts_keep_their_share_with_carried_rows(seed: int, target_ms: float | None, streams: int) -> None:
    """Consecutive short batches, in pauses or between batches, carry rows if they may."""
    rng, made, now = random.Random(seed), Decode(target_ms), 0.0
    rows_s, step_s = streams * ROW_S, 0.004 + streams * ROW_S
    log: list[tuple[float, float]] = []
    for _ in range(150):
        made.set_streams(now, streams, 100 * streams)
        shorts = waiting(*(rng.randint(1, 80) for _ in range(rng.randint(0, 3))))
        plan = Plan((SHORT,) if shorts else (), picked=tuple(range(len(shorts))))
        plan = made.adjust_plan(now, plan, shorts, [], paused(), sizes())
        prompts_s = sum(shorts[i].tokens for i in plan.picked) * TOKEN_S if plan.order else 0.0
        if plan.decode:
            took, rows = (prompts_s + rows_s, rows_s) if plan.decode == "carried" else (step_s, None)
            made.record_launch()
            made.record_step(now, now + took, streams=streams, within=True, rows_s=rows)
            log.append((took - prompts_s, prompts_s))
        else:
            log.append((0.0, prompts_s if plan.order else 0.004))
        now += sum(log[-1])
    for i in range(0, 150, 11):
        for j in range(i + 1, 151, 7):
            streams_s, prompts_s = map(sum, zip(*log[i:j], strict=True))
            assert prompts_s >= PROMPT_SHARE * (streams_s + prompts_s) - step_s - 1e-9


@given(st.integers(0, 1 << 30), st.floats(30.0, 500.0))
def test_token_gaps_stay_near_target_with_constant_step_time(seed: int, target_ms: float) -> None:
    """Slices of one length, short batches of any: each step ends by the target if prompts still get their share."""
    rng, made, now, slice_s, step_s = random.Random(seed), Decode(target_ms), 0.0, 0.004, 0.005
    made.set_streams(now, 8)
    for _ in range(200):
        shorts = waiting(*(rng.randint(1, 40) for _ in range(rng.randint(0, 30))))
        plan = Plan((SHORT,) if shorts else (), picked=tuple(range(len(shorts))))
        plan = made.adjust_plan(now, plan, shorts, [], paused(slice_s), sizes())
        if plan.decode:
            made.record_launch()
            made.record_step(now, now + step_s, streams=8, within=True)
            now += step_s
        else:
            now += sum(shorts[i].tokens for i in plan.picked) * TOKEN_S if plan.order else slice_s
    longest = made.statistics.gap_s(1.0)
    assert longest is not None
    assert longest <= target_ms / 1e3 + 2 * slice_s + step_s


def test_token_gaps_count_once_per_stream() -> None:
    made = Decode(None)
    made.set_streams(0.0, 1)
    made.record_step(0.9, 1.0, streams=97, within=False)
    made.record_step(2.9, 3.0, streams=3, within=True)
    assert (made.statistics.gap_s(0.5), made.statistics.gap_s(0.99), made.statistics.gap_s(1.0)) == (1.0, 2.0, 2.0)
    said = made.status()
    assert (said["steps"], said["steps_in_pauses"], said["tbt_ms"]["p99"]) == (2, 1, 2000.0)
    assert Decode(None).status()["tbt_ms"] == {"p50": None, "p99": None, "longest": None}


def test_guard_counts_decode_steps_as_delay_of_oldest_prompt() -> None:
    guard = Guard(0.25)
    guard.record_batch(1.0, oldest=True)
    guard.record_delay(4.0)
    guard.record_batch(1.0, oldest=False)
    assert guard.due(), "alone, a batch of one second would not have earned it"
    guard.record_delay(4.0)
    guard.reset()
    guard.record_batch(1.0, oldest=False)
    assert guard.credit_s == pytest.approx(0.25)
