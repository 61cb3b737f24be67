"""Servers with pages: LAPS never asks for a chunk that SGLang would round to nothing, with slices and without."""

from __future__ import annotations

import asyncio
import json

from served import LAPS, SLOW_WINDOW, Prefill, Reference, Setup, random_prompt, run_on, send_all

WHOLE_BATCHES = Setup(
    "whole-batches",
    (*LAPS, "--page-size", "64", "--chunked-prefill-size", "192", "--laps-config", json.dumps({"slice_ms": 0})),
)
# Sorted after test_window_off.py, because its lone user must come before any crowd.
pytestmark = run_on(SLOW_WINDOW, WHOLE_BATCHES)


def test_paged_server_computes_every_token_of_long_prompts(prefill: Prefill, reference: Reference) -> None:
    assert prefill.get("/laps_status")["slices"]["on"] == (prefill.setup is SLOW_WINDOW)
    for prompt in (random_prompt(1, 300), random_prompt(2, 700)):
        before = prefill.totals()["long"]
        assert asyncio.run(send_all(prefill, [prompt])) == reference.greedy(prompt, 1)
        after = prefill.totals()["long"]
        assert after["tokens"] - before["tokens"] == len(prompt)
        assert after["batches"] - before["batches"] >= -(-len(prompt) // 192)
    mixed = [random_prompt(1, 300), random_prompt(2, 700)] + [random_prompt(3, 60)] * 8
    assert len(asyncio.run(send_all(prefill, mixed, spread_s=0.2))) == 10
    prefill.require_all_tokens_free()
