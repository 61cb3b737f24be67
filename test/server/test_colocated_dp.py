"""Data-parallel attention ranks that prefill and decode: one plan for all, and every token right."""

from __future__ import annotations

import asyncio
import json
import random

import pytest
from served import LAPS, Prefill, Reference, Setup, on
from sglang_laps import compat

from .colocated import COUNT, Asked, at_once, mixed, some_leave
from .test_architectures import DP_ATTENTION, TWO_CORES
from .test_colocated_drafts import CHAIN
from .test_group_mixed import NEAR
from .test_slices_models import EXPERTS, steps_of_many_sizes

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
pytestmark = [pytest.mark.timeout(600 + 5 * COUNT), *on(*SETUPS)]


def must_be_right(asked: list[Asked], reference: Reference) -> None:
    """Require that every token has (nearly) the highest probability, and that clients that stayed got all tokens."""
    for a in asked:
        assert a.leaves_s is not None or len(a.tokens) == a.new, (a.rid, a.end)
        if a.tokens:
            found = reference.scores(a.prompt, a.tokens)
            behind = found.max(-1).values - found.gather(-1, reference.torch.tensor(a.tokens)[:, None])[:, 0]
            assert float(behind.max()) <= NEAR, f"{a.rid}, a prompt of {len(a.prompt)} tokens"


def test_ranks_that_decode_have_one_plan_too(prefill: Prefill, reference: Reference) -> None:
    status = prefill.get("/laps_status")
    assert status["enabled"], status["reason"]
    assert asyncio.run(steps_of_many_sizes(prefill)), "times of steps are not learnt"
    before = prefill.get("/laps_status")
    asked = mixed(3, COUNT, "dp", COUNT / 8)
    some_leave(asked, random.Random(3))
    asyncio.run(at_once(prefill, asked))
    must_be_right(asked, reference)
    prefill.all_tokens_are_free()
    after = prefill.get("/laps_status")
    both = zip(after["ranks"], before["ranks"], strict=True)
    steps = [now["group"]["steps"] - then["group"]["steps"] for now, then in both]
    assert steps[0] == steps[1] > 0
    decode = after["decode"]
    assert decode["steps"] > before["decode"]["steps"]
    assert decode["steps_in_pauses"] == 0
    assert 0.0 < decode["tbt_ms"]["p50"] <= decode["tbt_ms"]["longest"]
    assert after["slices"]["why_not"]
