"""Every learned latency model is safe for the scheduler: any term can be 0 if the measured steps do not show it."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from laps_core.config import LapsConfig
from laps_core.latency.model import LatencyModel
from laps_core.latency.step import Coefficients
from laps_core.length import LONG
from laps_core.policy.decode import Decode
from laps_core.policy.order import ORDERS
from laps_core.policy.pacer import Pacer
from laps_core.policy.types import Account, Paused, Plan, Running, Waiting
from laps_core.receipts.quote import quote
from laps_core.receipts.quoter import Device, Quoter
from pacers import COSTS, MODELS

CHUNK = 4096

deadlines = st.one_of(st.none(), st.floats(-1.0, 9.0))
shorts = st.builds(Waiting, st.integers(1, 256), st.sampled_from([0, 9000]), st.floats(-9.0, 0.0), deadlines)
longs = st.builds(
    Waiting, st.integers(257, 30_000), st.sampled_from([0, 9000]), st.floats(-9.0, 0.0), deadlines,
    started=st.booleans(), priority=st.integers(0, 1),
)  # fmt: skip
breaks = st.builds(
    Paused,
    st.floats(0.0, 1.0),
    st.integers(1, 2),
    weight=COSTS,
    deadlines=st.lists(st.floats(-1.0, 9.0), max_size=3).map(tuple),
    slice_s=st.floats(0.0, 0.01),
)


@given(
    model=MODELS, short=st.lists(shorts, max_size=5), long=st.lists(longs, max_size=4),
    paused=st.one_of(st.none(), breaks),
    knobs=st.fixed_dictionaries({
        "order": st.sampled_from(sorted(ORDERS)), "ttft_slo_ms": st.sampled_from([None, 400.0]),
        "guard": st.sampled_from([0.0, 0.1]), "preempt_overhead": st.sampled_from([0.25, 1.0]),
    }),
    layers=st.sampled_from([0, 28]), even=st.booleans(), rounds=st.lists(st.floats(0.0, 0.1), min_size=1, max_size=4),
    streams=st.integers(0, 40), step_s=COSTS,
)  # fmt: skip
def test_plans_and_quotes_are_valid_for_any_latency_model(
    model: Coefficients, short: list[Waiting], long: list[Waiting], paused: Paused | None, knobs: dict[str, Any],
    layers: int, even: bool, rounds: list[float], streams: int, step_s: float,
) -> None:  # fmt: skip
    config = LapsConfig(**knobs)
    pacer = Pacer(config, chunk_tokens=CHUNK, layers=layers, even=even, model=LatencyModel(model))
    quoter, decode, now = Quoter(config, pacer, 0.0), Decode(None), 0.0
    decode.record_launch()
    decode.record_step(-step_s, 0.0, streams=streams, within=False)
    for seconds in rounds:
        pacer.record_arrivals(now, len(short))
        decode.set_streams(now, streams, 1000 * streams)
        plan = pacer.plan(now, short, long, paused=paused)
        plan = decode.adjust_plan(now, plan, short, long, paused, pacer.sizes)
        assert Plan.of(plan.numbers()) == plan._replace(account=Account())
        if plan.order:
            cls = plan.order[0]
            several = [short[i] for i in plan.picked] if cls != LONG else [long[i] for i in plan.long.picked]
            batch = Running(cls=cls, shape=[(w.tokens, w.history) for w in several], within=paused is not None)
            pacer.record_launch(now, batch, plan)
            assert pacer.free_s(now, [batch]) >= now
            now += seconds
            pacer.record_result(batch, None, now)
        state = quoter.state(now, Device())
        assert state is not None
        for tokens in (1, 9000):
            found = quote(state, tokens, 0)
            assert 0.0 <= found.low_ms <= found.ttft_ms <= found.high_ms < math.inf
