"""Servers that prefill and decode with LoRA adapters: streams of one adapter continue in the pauses of a prompt of
another adapter."""

from __future__ import annotations

import asyncio
import random

import pytest
from rounds import until_seen
from served import LAPS, Prefill, Reference, Setup, on

from .colocated import COUNT, EVERY_PAUSE, LOOPS, at_once, mixed, must_be_right, some_leave
from .test_architectures import lora_args, with_adapters

TWO_SLOTS = ("--max-loras-per-batch", "2")
"""Arguments for one slot fewer than needed: requests without an adapter need a slot, too."""
SETUPS = tuple(
    Setup(f"colocated-lora-{name}", (*LAPS, *EVERY_PAUSE, *TWO_SLOTS, *flags), {}, "qwen2", lora_args, mode="null")
    for name, flags in LOOPS.items()
)
pytestmark = [pytest.mark.timeout(600 + 5 * COUNT), *on(*SETUPS)]


def test_every_token_is_of_the_adapter_that_was_asked_for(prefill: Prefill, reference: Reference) -> None:
    """A third of the clients leave or abort."""
    models = with_adapters(reference)
    before = prefill.get("/laps_status")

    def once(i: int) -> bool:
        rng, asked = random.Random(i), mixed(100 * i + 1, COUNT, f"{prefill.setup.name}-{i}", COUNT / 12)
        for a in asked:
            a.adapter = rng.choice([*models])
        some_leave(asked, rng)
        asyncio.run(at_once(prefill, asked))
        for name, model in models.items():
            must_be_right([a for a in asked if a.adapter == name], model)
        prefill.all_tokens_are_free()
        after = prefill.get("/laps_status")
        assert after["enabled"], after["reason"]
        steps = after["decode"]["steps_in_pauses"] - before["decode"]["steps_in_pauses"]
        return steps > 0 and after["preemption"]["by_short_batches"] > before["preemption"]["by_short_batches"]

    until_seen(once, "steps and short batches run in pauses")
