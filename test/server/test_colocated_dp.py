"""Data-parallel attention ranks that prefill and decode: one plan for all, and every token right."""

from __future__ import annotations

import asyncio
import json
import random

import pytest
from served import LAPS, Prefill, Reference, Setup, run_on
from sglang_laps import compat

from .colocated import COUNT, Request, abort_some, mixed_requests, send_all_at_their_times
from .test_architectures import DP_ATTENTION, TWO_CORES
from .test_colocated_drafts import CHAIN
from .test_group_mixed import NEAR
from .test_slices_models import EXPERTS, measure_steps_of_many_sizes

TARGET = ("--laps-config", json.dumps({"tbt_ms": 200.0}))
FLAGS = {
    "colocated-dp": EXPERTS,
    "colocated-dp-nextn": (*CHAIN, "--speculative-algorithm", "NEXTN"),
}
SETUPS = [
    Setup(
        name,
        (*LAPS, *DP_ATTENTION, "--chunked-prefill-size", "2048", *TARGET, *flags),
        TWO_CORES,
        "deepseek3",
        mode="null",
    )
    for name, flags in FLAGS.items()
    if not flags or compat.release().drafts_in_pauses
]
pytestmark = [pytest.mark.timeout(600 + 5 * COUNT), *run_on(*SETUPS)]


def require_right_answers(requests: list[Request], reference: Reference) -> None:
    """Require that every token has (nearly) the highest probability, and that clients that stayed got all tokens."""
    for a in requests:
        assert a.leaves_after_s is not None or len(a.tokens) == a.new, (a.rid, a.end)
        assert reference.shortfall(a.prompt, a.tokens) <= NEAR, f"{a.rid}, a prompt of {len(a.prompt)} tokens"


def test_decoding_dp_ranks_share_plan_and_tokens_are_correct(prefill: Prefill, reference: Reference) -> None:
    status = prefill.get("/laps_status")
    assert status["enabled"], status["reason"]
    assert asyncio.run(measure_steps_of_many_sizes(prefill)), "times of steps are not learnt"
    before = prefill.get("/laps_status")
    requests = mixed_requests(3, COUNT, "dp", COUNT / 8)
    abort_some(requests, random.Random(3))
    asyncio.run(send_all_at_their_times(prefill, requests))
    require_right_answers(requests, reference)
    prefill.require_all_tokens_free()
    after = prefill.get("/laps_status")
    both = zip(after["ranks"], before["ranks"], strict=True)
    steps = [now["group"]["steps"] - then["group"]["steps"] for now, then in both]
    assert steps[0] == steps[1] > 0
    decode = after["decode"]
    assert decode["steps"] > before["decode"]["steps"]
    assert decode["steps_in_pauses"] == 0
    assert 0.0 < decode["tbt_ms"]["p50"] <= decode["tbt_ms"]["longest"]
    assert after["slices"]["why_not"]
