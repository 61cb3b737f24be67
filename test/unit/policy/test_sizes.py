"""Predicted times of waiting work and the resulting sizes, with known coefficients."""

from __future__ import annotations

import pytest
from laps_core.latency.model import LatencyModel
from laps_core.latency.step import Coefficients, Requests
from laps_core.policy.predict import REMEMBERED, TOKEN_S, Sizes
from laps_core.policy.types import Waiting

TOKEN, HISTORY, REQUEST, FIXED = 1 / 1024, 1 / 8192, 1 / 16, 3 / 16
"""Coefficients (seconds), whose sums have no rounding errors."""


def sizes(
    *, known: bool = True, chunk: int | None = 1024, unit: int = 1, layers: int = 28, even: bool = False
) -> Sizes:
    model = LatencyModel(Coefficients(0.0, TOKEN, HISTORY, REQUEST, FIXED) if known else None)
    return Sizes(model, chunk_tokens=chunk, unit=unit, layers=layers, slice_s=1 / 16, even=even)


PARKED = Waiting(400, 800, 0.0, new_tokens=1000)
"""Parked prompt: 200 tokens came from the cache, 600 are computed, 400 are left."""


def test_work_counts_remaining_tokens_and_lone_time_all_tokens() -> None:
    me = sizes()
    assert me.fixed_s == FIXED + REQUEST
    assert me.work_s(PARKED) == FIXED + REQUEST + 400 * TOKEN + 800 * HISTORY
    assert me.lone_s(PARKED) == FIXED + REQUEST + 1000 * TOKEN + 200 * HISTORY
    assert me.lone_s(Waiting(400, 800, 0.0)) == me.work_s(PARKED)
    assert me.beside_s(PARKED) == 400 * TOKEN + 800 * HISTORY


def test_work_is_estimated_from_tokens_without_model() -> None:
    me = sizes(known=False)
    assert me.fixed_s is None
    assert me.work_s(PARKED) == me.beside_s(PARKED) == 400 * TOKEN_S
    assert me.lone_s(PARKED) == 1000 * TOKEN_S


class CountingModel(LatencyModel):
    """Latency model that counts its predictions."""

    asked = 0

    def predict(self, requests: Requests) -> float | None:
        self.asked += 1
        return super().predict(requests)


def test_predictions_are_cached_until_model_changes() -> None:
    model = CountingModel(Coefficients(0.0, TOKEN, HISTORY, REQUEST, FIXED))
    me = Sizes(model, chunk_tokens=1024, unit=1, layers=28, slice_s=1 / 16)
    for _ in range(2):
        for tokens in range(1, REMEMBERED + 1):
            me.work_s(Waiting(tokens, 0, 0.0))
    assert model.asked == REMEMBERED
    for _ in range(2):
        me.work_s(Waiting(REMEMBERED + 1, 0, 0.0))
        me.work_s(Waiting(1, 0, 0.0))
    assert model.asked == REMEMBERED + 3, "all is forgotten once there is more"
    model.coefficients = Coefficients(0.0, 2 * TOKEN, HISTORY, REQUEST, FIXED)
    assert me.work_s(Waiting(1, 0, 0.0)) == FIXED + REQUEST + 2 * TOKEN


def test_weight_is_sum_of_inverse_lone_times() -> None:
    me, short, long = sizes(), Waiting(64, 0, 0.0), Waiting(768, 0, 0.0)
    assert me.weight([short, long]) == 1 / me.lone_s(short) + 1 / me.lone_s(long)


def test_timely_chunk_is_sized_to_fit_gap() -> None:
    new = Waiting(5000, 0, 0.0)
    assert sizes().timely_chunk(new, 0, 0.5) == 512
    assert sizes(unit=100).timely_chunk(new, 0, 0.5) == 500
    assert sizes().timely_chunk(new, 0, 0.01) == 256, "its fixed time is never more than half of it"
    assert sizes().timely_chunk(new, 600, 0.5) == 424, "what the short requests leave"
    assert sizes(known=False, unit=64).timely_chunk(new, 100, 0.5) == 896, "whole units of what they leave"
    assert sizes(unit=64).timely_chunk(new, 1024, 0.5) == 64


def test_pipeline_chunks_take_equal_time() -> None:
    me, patient_s = sizes(even=True), 10.0
    full_s = me.model.predict([(1024, 0)])
    for history in (0, 1024, 2048):
        tokens = me.timely_chunk(Waiting(9000, history, 0.0), 0, patient_s)
        assert me.model.predict([(tokens, history)]) == full_s
        assert tokens == 1024 - history // 8, "a token of the history takes an eighth of a new one"
        assert sizes().timely_chunk(Waiting(9000, history, 0.0), 0, patient_s) == 1024
    # Reading this history takes 4.25 s for any chunk; the chunk's own work then takes as long, half of the step.
    far = Waiting(9000, 1 << 15, 0.0)
    assert me.model.predict([(0, far.history)]) == 4.25
    assert sizes(even=True, chunk=1 << 13).timely_chunk(far, 0, patient_s) == 4.25 / TOKEN
    assert sizes(even=True, chunk=1 << 14).timely_chunk(far, 0, 2 * patient_s) == (1 << 14) - (1 << 12)
    # Short requests share the step: their tokens, and the time of one more request.
    assert me.timely_chunk(Waiting(9000, 1024, 0.0), 256, patient_s) == 1024 - 128 - 256 - REQUEST / TOKEN
    assert me.timely_chunk(Waiting(9000, 0, 0.0), 0, 0.5) == 512, "and none takes longer than the gap"
    assert sizes(even=True, known=False).timely_chunk(far, 24, patient_s) == 1000


@pytest.mark.parametrize(("tokens", "layers"), [(200, 6), (150, 7), (100, 8), (50, 9), (10_000, 6)])
def test_slice_layers_match_slice_time(tokens: int, layers: int) -> None:
    longs = [Waiting(100, 0, 0.0), Waiting(100, 0, 0.0)]
    assert sizes(layers=56).slice_layers(longs, tokens) == (layers, 1)
