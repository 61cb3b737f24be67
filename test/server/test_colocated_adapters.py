"""Servers that prefill and decode with LoRA adapters: streams of one adapter continue in the pauses of a prompt of
another adapter."""

from __future__ import annotations

import asyncio
import random

import pytest
from rounds import repeat_until
from served import LAPS, Prefill, Reference, Setup, run_on

from .colocated import (
    COUNT,
    FREQUENT_PAUSES,
    LOOPS,
    abort_some,
    mixed_requests,
    require_right_answers,
    send_all_at_their_times,
)
from .test_architectures import lora_args, with_adapters

TWO_SLOTS = ("--max-loras-per-batch", "2")
"""Arguments for one slot fewer than needed: requests without an adapter need a slot, too."""
SETUPS = tuple(
    Setup(f"colocated-lora-{name}", (*LAPS, *FREQUENT_PAUSES, *TWO_SLOTS, *flags), {}, "qwen2", lora_args, mode="null")
    for name, flags in LOOPS.items()
)
pytestmark = [pytest.mark.timeout(600 + 5 * COUNT), *run_on(*SETUPS)]


def test_tokens_match_requested_lora_adapter(prefill: Prefill, reference: Reference) -> None:
    """A third of the clients leave or abort."""
    models = with_adapters(reference)
    before = prefill.get("/laps_status")

    def attempt(i: int) -> bool:
        rng, requests = random.Random(i), mixed_requests(100 * i + 1, COUNT, f"{prefill.setup.name}-{i}", COUNT / 12)
        for a in requests:
            a.adapter = rng.choice([*models])
        abort_some(requests, rng)
        asyncio.run(send_all_at_their_times(prefill, requests))
        for name, model in models.items():
            require_right_answers([a for a in requests if a.adapter == name], model)
        prefill.require_all_tokens_free()
        after = prefill.get("/laps_status")
        assert after["enabled"], after["reason"]
        steps = after["decode"]["steps_in_pauses"] - before["decode"]["steps_in_pauses"]
        return steps > 0 and after["preemption"]["by_short_batches"] > before["preemption"]["by_short_batches"]

    repeat_until(attempt, "steps and short batches run in pauses")
