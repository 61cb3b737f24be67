"""Servers that prefill and decode: prefill batches with rows of the streams, and every token as it is alone."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest
from served import Prefill, Reference, ids, on

from .colocated import FEATURES, GRAMMARS, SETUPS, Asked, alone, at_once, mixed, must_be_as, must_be_right

WITH_ROWS = [
    replace(s, name=f"{s.name}-rows", args=tuple(a.replace('"tbt_ms": 1.0', '"tbt_ms": 300.0') for a in s.args))
    for s in SETUPS
]
"""Steps are seldom due here, so that batches end before tokens are late."""
pytestmark = [pytest.mark.timeout(600), *on(*WITH_ROWS)]


def carried(prefill: Prefill) -> int:
    return int(prefill.get("/laps_status")["decode"]["steps_carried"])


def ready(prefill: Prefill, name: str) -> None:
    """Its latency model knows what a batch takes."""
    for i in range(6):
        if prefill.get("/laps_status")["latency_model"]["fitted"]:
            return
        asyncio.run(at_once(prefill, mixed(60 + i, 24, f"{name}-{i}-{prefill.setup.name}", 1.0)))
    pytest.fail(str(prefill.get("/laps_status")["latency_model"]))


def test_short_batches_carry_streams_of_every_kind(prefill: Prefill, reference: Reference) -> None:
    """Streams with penalties and a grammar, one that is aborted, and some that end while their rows run.

    Their contexts are small: a CPU's attention computes the whole of each for a row, and large ones do not pay.
    """
    rng, name = random.Random(11), f"rows-{prefill.setup.name}"
    ready(prefill, f"{name}-ready")
    before = carried(prefill)
    streams = [Asked(f"{name}-stream-{i}-x", ids(1100 + i, 6 + i), 60 + 5 * i, 0.5 * i) for i in range(8)]
    for s, sampling in zip(streams[::2], (*FEATURES, GRAMMARS[0]), strict=True):
        s.sampling = sampling
    streams[1].leaves_s, streams[1].aborts = 1.0, True
    prompts = [ids(1200 + i, rng.randint(10, 250)) for i in range(30)]
    shorts = [Asked(f"{name}-{i}-x", p, rng.randint(1, 8), 0.5 + 0.1 * i) for i, p in enumerate(prompts)]
    for s, sampling in zip(shorts[::6], (*FEATURES, *GRAMMARS), strict=False):
        s.sampling, s.new = sampling, 60 if "frequency_penalty" not in sampling else 12
    longs = [Asked(f"{name}-long-{i}-x", ids(1300 + i, 2500), 4, 1.0 + i) for i in range(2)]
    asked = [*streams, *shorts, *longs]
    asyncio.run(at_once(prefill, asked))
    assert carried(prefill) > before
    plain = [a for a in asked if not a.sampling]
    must_be_right(plain, reference)
    prefill.all_tokens_are_free()
    other = [a for a in asked if a.sampling]
    must_be_as(other, alone(prefill, other))
    prefill.all_tokens_are_free()


def test_streams_with_log_probabilities_have_steps_of_their_own(prefill: Prefill) -> None:
    name = f"rows-logprobs-{prefill.setup.name}"
    ready(prefill, f"{name}-ready")
    before = carried(prefill)
    asked = [Asked(f"{name}-{i}-x", ids(1400 + i, 60), 40, 0.1 * i, logprobs=True) for i in range(10)]
    asyncio.run(at_once(prefill, asked))
    assert carried(prefill) == before
    must_be_as(asked, alone(prefill, asked))
    prefill.all_tokens_are_free()


def test_streams_are_retracted_although_their_rows_run_in_batches(prefill: Prefill, reference: Reference) -> None:
    name, log = f"rows-retract-{prefill.setup.name}", prefill.server.log
    ready(prefill, f"{name}-ready")
    before, retracted = carried(prefill), log.read_text(errors="replace").count("Retract requests")
    asked = [Asked(f"{name}-{i}-x", ids(1500 + i, 240), 200, 0.02 * i) for i in range(18)]
    for i, a in enumerate(asked):
        a.sampling = {"ignore_eos": False, **(FEATURES[0] if i % 3 == 0 else {})}
    asked += [Asked(f"{name}-short-{i}-x", ids(1600 + i, 30), 3, 0.5 + 0.15 * i) for i in range(20)]
    asyncio.run(at_once(prefill, asked))
    assert log.read_text(errors="replace").count("Retract requests") > retracted
    assert carried(prefill) > before
    must_be_right([a for a in asked if "frequency_penalty" not in a.sampling], reference)
    prefill.all_tokens_are_free()
    other = [a for a in asked if "frequency_penalty" in a.sampling]
    must_be_as(other, alone(prefill, other))
    prefill.all_tokens_are_free()
