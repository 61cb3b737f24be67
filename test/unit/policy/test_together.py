"""One step for short requests, a part of a long prompt and the streams' rows."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from laps_core.latency.model import LatencyModel
from laps_core.latency.step import Coefficients
from laps_core.length import LONG, SHORT
from laps_core.policy.decode import OWED, PROMPT_SHARE, Decode
from laps_core.policy.predict import Sizes
from laps_core.policy.together import together
from laps_core.policy.types import Account, LongBatch, Plan, Waiting

TOKEN_S, FIXED_S = 1e-4, 0.002
"""Time of a prompt token, and fixed time of a step (seconds)."""
BOTH = Plan((SHORT, LONG), picked=(0, 1), long=LongBatch((0,), 4096, 1), account=Account(contended=True))
"""Plan in which two short requests run before a long prompt in slices."""


def sizes(chunk: int | None = 4096, unit: int = 1, *, flat: int = 0) -> Sizes:
    model = LatencyModel(Coefficients(0.0, TOKEN_S, 0.0, 0.0, FIXED_S, flat))
    return Sizes(model, chunk_tokens=chunk, unit=unit, layers=10, slice_s=0.004)


def due(*tokens: int, by_s: float | None = 1.0) -> list[Waiting]:
    return [Waiting(n, 0, float(i), by_s, n) for i, n in enumerate(tokens)]


SHORTS, LONGS = due(50, 50), due(4000)


def joint(plan: Plan = BOTH, *, shorts: list[Waiting] = SHORTS, longs: list[Waiting] = LONGS) -> Plan | None:
    return together(0.0, plan, shorts, longs, sizes(), within_s=0.1, rows=4)


def test_long_prompt_is_chunked_to_fit_step_time() -> None:
    """The 100 ms consist of 2 ms for the step, 10 for the short requests, and 88 for 880 tokens of the long prompt."""
    plan = joint()
    assert plan is not None
    assert (plan.order, plan.mixed, plan.picked) == ((LONG,), True, (0, 1))
    assert plan.long == LongBatch((0,), 980)


def test_shared_step_ends_in_time_for_short_requests() -> None:
    plan = joint(shorts=due(50, 50, by_s=0.052))
    assert plan is not None
    assert plan.long.tokens == pytest.approx(100 + 400, abs=1)
    late = joint(shorts=due(50, 50, by_s=0.011))
    assert late is not None
    assert late.long.tokens == 980, "alone they would be late, too"


@pytest.mark.parametrize(
    ("shorts", "longs"),
    [
        (due(50, 50, by_s=None), LONGS),
        (SHORTS, due(4000, by_s=None)),
        (SHORTS, [*LONGS, *due(9, by_s=None)]),
        (due(50, 50, by_s=0.0121), LONGS),
        (due(50, 500), LONGS),
    ],
    ids=["short", "long", "another", "no time", "too little"],
)
def test_classes_stay_apart_without_deadlines_or_enough_time(shorts: list[Waiting], longs: list[Waiting]) -> None:
    assert joint(shorts=shorts, longs=longs) is None


@pytest.mark.parametrize(("by_s", "apart"), [(6.0, False), (7.0, True)])
def test_classes_stay_apart_while_all_deadlines_are_far(by_s: float, apart: bool) -> None:
    """The work takes 0.416 s."""
    assert (joint(shorts=due(50, 50, by_s=9.0), longs=due(4000, by_s=by_s)) is None) == apart
    assert joint(shorts=due(50, 50, by_s=0.1), longs=due(4000, by_s=by_s)) is not None


def test_no_shared_step_without_long_prompts() -> None:
    assert joint(BOTH._replace(long=LongBatch())) is None


def test_further_prompts_join_unchunked_while_time_allows() -> None:
    plan = BOTH._replace(long=LongBatch((2, 0, 1), 4096, 1))
    joined = joint(plan, longs=due(300, 300, 400))
    assert joined is not None
    assert joined.long == LongBatch((2, 0), 800), "the third would end at 112 ms"
    assert joined.account.oldest
    other = joint(plan._replace(long=LongBatch((2, 1), 4096, 1)), longs=due(300, 900, 400))
    assert other is not None
    assert (other.long.picked, other.account.oldest) == ((2,), False)


def test_chunked_prompt_ends_on_whole_unit() -> None:
    plan = together(0.0, BOTH, due(50, 50), due(4000), sizes(unit=64), within_s=0.1, rows=4)
    assert plan is not None
    assert plan.long.tokens == 2 * 64 + 13 * 64


@given(st.integers(0, 1 << 30))
def test_shared_step_stays_within_time_and_token_budget(seed: int) -> None:
    rng = random.Random(seed)
    made = sizes(rng.choice([512, 2048, 8192]), rng.choice([1, 16]))
    shorts = due(*(rng.randint(1, 60) for _ in range(rng.randint(0, 5))), by_s=rng.uniform(0.0, 0.3))
    longs = due(*(rng.randint(300, 9000) for _ in range(rng.randint(1, 4))))
    plan = Plan((LONG,), tuple(range(len(shorts))), LongBatch(tuple(range(len(longs))), 8192, 1))
    within_s, rows = rng.uniform(0.01, 0.5), rng.randint(1, 100)
    found = together(0.0, plan, shorts, longs, made, within_s=within_s, rows=rows)
    if found is None:
        return
    assert found.long.tokens + rows <= made.budget
    left, shape = found.long.tokens, [(w.tokens, 0) for w in shorts]
    left -= sum(made.whole_units(w.tokens) for w in shorts)
    for w in (longs[i] for i in found.long.picked):
        shape.append((min(w.tokens, left), 0))
        left -= shape[-1][0]
    assert left < made.unit, "all of the tokens are somebody's"
    assert shape[-1][0] > 0
    took_s = made.model.predict(shape) or 0.0
    assert took_s <= within_s + 1e-9
    whole = shape[-1][0] == longs[found.long.picked[-1]].tokens
    assert whole or took_s >= 2.0 * made.batch_s(shorts)


def decode() -> Decode:
    """Return a Decode with four streams whose last step ended at 0; a token is due every 100 ms."""
    made = Decode(100.0)
    made.set_streams(-FIXED_S, 4)
    made.record_launch()
    made.record_step(-FIXED_S, 0.0, streams=4, within=False)
    made.set_streams(0.0, 4, 400)
    return made


def test_shared_step_carries_decode_rows_without_slices() -> None:
    plan = decode().adjust_plan(0.0, BOTH, due(50, 50), due(4000), None, sizes())
    assert (plan.order, plan.mixed, plan.decode, plan.long.layers) == ((LONG,), True, "carried", 0)
    assert plan.long.tokens == pytest.approx(980 - 4, abs=1), "rows of 0.4 ms"


def test_plan_keeps_classes_separate_if_apart_is_set() -> None:
    apart = decode().adjust_plan(0.0, BOTH, due(50, 50), due(4000), None, sizes(), apart=True)
    assert apart == BOTH._replace(decode="carried"), "short requests alone, and the rows"


def test_classes_stay_apart_without_rows_or_deadlines() -> None:
    made = decode()
    made.set_streams(0.0, 4, None)
    assert made.adjust_plan(0.0, BOTH, due(50, 50), due(4000), None, sizes()) == BOTH
    free = [w._replace(deadline_s=None) for w in due(50, 50)]
    assert not decode().adjust_plan(0.0, BOTH, free, due(4000), None, sizes()).mixed


HIDES = sizes(flat=180)
"""Sizes of a device that reads the weights in 18 ms while it computes."""
LONG_ALONE = Plan((LONG,), long=LongBatch((0,), 4000, 1))


def free(*tokens: int) -> list[Waiting]:
    return due(*tokens, by_s=None)


@pytest.mark.parametrize(("per_s", "carried"), [(0.0, True), (0.01, True), (10.0, False), (math.inf, False)])
def test_part_of_long_prompt_carries_rows_if_few_short_requests_arrive(per_s: float, carried: bool) -> None:
    """A decode step of 20 ms every 100 ms takes a fifth of the device from slices."""
    plan = slow_steps().adjust_plan(0.0, LONG_ALONE, [], free(4000), None, HIDES, per_s=per_s)
    assert (plan.decode, plan.long.layers) == ("carried" if carried else "", 1)
    assert (plan.long.tokens < 980) == carried


def test_more_waiting_long_prompts_pay_for_waits_of_short_requests() -> None:
    def carries(longs: int) -> bool:
        waiting = free(*[4000] * longs)
        return slow_steps().adjust_plan(0.0, LONG_ALONE, [], waiting, None, HIDES, per_s=2.0).decode == "carried"

    assert (carries(1), carries(20)) == (False, True)


@pytest.mark.parametrize("plan", [LONG_ALONE._replace(long=LongBatch((0,), 4000)), BOTH])
def test_only_long_batches_in_slices_are_cut(plan: Plan) -> None:
    made = slow_steps().adjust_plan(0.0, plan, free(50, 50), free(4000), None, HIDES, per_s=0.0)
    assert made.decode != "carried" or made.order != (LONG,) or made.long.tokens == plan.long.tokens


@pytest.mark.parametrize(("target_ms", "chunk"), [(0.0, 4096), (100.0, None)])
def test_without_target_or_chunks_no_prompt_is_cut(target_ms: float, chunk: int | None) -> None:
    plan = slow_steps(target_ms).adjust_plan(0.0, LONG_ALONE, [], free(4000), None, sizes(chunk, flat=180), per_s=0.0)
    assert plan.long.tokens == LONG_ALONE.long.tokens


def slow_steps(target_ms: float = 100.0) -> Decode:
    """Return a Decode like ``decode`` whose steps take 20 ms."""
    made = Decode(target_ms)
    made.set_streams(-0.02, 4)
    made.record_launch()
    made.record_step(-0.02, 0.0, streams=4, within=False)
    made.set_streams(0.0, 4, 400)
    return made


@given(st.integers(0, 1 << 30), st.integers(1, 60))
def test_prompts_keep_minimum_share_of_device_time(seed: int, streams: int) -> None:
    rng, made, now = random.Random(seed), Decode(None), 0.0
    rows_s = streams * (TOKEN_S + 1e-5)
    step_s = FIXED_S + streams * 1e-5 + rows_s
    log: list[tuple[float, float]] = []
    for _ in range(100):
        made.set_streams(now, streams, 100 * streams)
        shorts = due(*(rng.randint(1, 60) for _ in range(rng.randint(0, 3))), by_s=now + 1.0)
        longs = due(rng.randint(100, 9000), by_s=now + 9.0)
        plan = plan_for(shorts)
        plan = made.adjust_plan(now, plan, shorts, longs, None, sizes())
        tokens = plan.long.tokens if plan.order == (LONG,) else sum(shorts[i].tokens for i in plan.picked)
        tokens = min(tokens, sum(w.tokens for w in (*shorts, *longs)))
        prompts_s = FIXED_S + tokens * TOKEN_S if plan.order else 0.0
        rows = made.rows_s(sizes())
        if plan.decode:
            took = prompts_s + rows if plan.decode == "carried" else step_s
            made.record_launch()
            made.record_step(
                now, now + took, streams=streams, within=False, rows_s=rows if plan.decode == "carried" else None
            )
            log.append((took - prompts_s, prompts_s))
        else:
            log.append((0.0, prompts_s))
        now += sum(log[-1])
    for i in range(0, 100, 11):
        for j in range(i + 1, 101, 7):
            streams_s, prompts_s = map(sum, zip(*log[i:j], strict=True))
            assert prompts_s >= PROMPT_SHARE * (streams_s + prompts_s) - (1.0 + OWED) * step_s - 1e-9


def plan_for(shorts: list[Waiting]) -> Plan:
    """Return the policy's plan for these short requests and one long prompt."""
    order = (SHORT, LONG) if shorts else (LONG,)
    return BOTH._replace(order=order, picked=tuple(range(len(shorts))))
