"""Servers that prefill and decode: what SGLang keeps for each stream beside its tokens (penalties, grammars,
log-probabilities), and prompts that are aborted while they are paused."""

from __future__ import annotations

import asyncio
import random
import re
from pathlib import Path

import pytest
from rounds import until_seen
from served import LAPS, Prefill, Reference, Setup, ids, on, started

from .colocated import (
    FEATURES,
    SETUPS,
    Asked,
    alone,
    at_once,
    mixed,
    must_be_as,
    must_be_right,
    retractions,
    with_features,
)

pytestmark = [pytest.mark.timeout(600), *on(*SETUPS)]


def test_with_penalties_grammars_and_log_probabilities_streams_answer_as_a_stock_server_one_at_a_time(
    prefill: Prefill, tmp_path: Path
) -> None:
    asked = with_features(mixed(3, 18, f"features-{prefill.setup.name}", 1.0))
    asyncio.run(at_once(prefill, asked))
    prefill.all_tokens_are_free()
    own, at = prefill.setup, prefill.setup.args.index("--laps-config")
    flags = tuple(a for a in (*own.args[:at], *own.args[at + 2 :]) if a not in LAPS)
    with started(Setup(f"{own.name}-stock", flags, own.env, own.shape, mode=own.mode), tmp_path) as stock:
        must_be_as(asked, alone(stock, asked))
    bound = [a for a in asked if "regex" in a.sampling and a.end["type"] == "stop"]
    assert bound, [(a.sampling, a.text, a.end) for a in asked if a.sampling]
    assert all(re.fullmatch(a.sampling["regex"], a.text) for a in bound), [a.text for a in bound]


def test_streams_that_are_retracted_keep_their_penalties_and_grammars(prefill: Prefill, reference: Reference) -> None:
    """In pauses, too: long prompts hold the memory that streams lack. Stock SGLang begins to count anew; here a request
    has the answer that it has alone."""
    before = retractions(prefill)

    def once(i: int) -> bool:
        name, seed = f"counts-{i}-{prefill.setup.name}", 840 + 1000 * i
        # All at once, and so long that the first is not done when the last begins, unless the machine is held up.
        asked = [Asked(f"{name}-{i}-x", ids(seed + i, 380), 110, 0.0) for i in range(14)]
        for i, a in enumerate(asked):
            a.sampling = {"ignore_eos": False, **((*FEATURES, {"regex": "[a-z ]{200,300}"}, {})[i % 5])}
            if "min_new_tokens" in a.sampling:
                a.sampling["min_new_tokens"] = 100
        asked += [Asked(f"{name}-{i}-x", ids(seed + i, 1500), 4, 0.5 + i - 14) for i in range(14, 16)]
        asyncio.run(at_once(prefill, asked))
        prefill.all_tokens_are_free()
        plain = asked[4::5]
        must_be_right(plain, reference)
        other = [a for a in asked if a not in plain]
        must_be_as(other, alone(prefill, other, clients=5))
        prefill.all_tokens_are_free()
        return retractions(prefill) > before

    until_seen(once, "a stream is retracted")


def test_an_abort_ends_a_paused_prompt_at_its_next_pause(prefill: Prefill, reference: Reference) -> None:
    """The memory of the prompt is free, nothing of what it computed is anybody's prefix, and streams go on."""
    before = prefill.get("/laps_status")["decode"]["abandoned_passes"]

    def once(i: int) -> bool:
        rng, name, seed = random.Random(4), f"mid-pass-{i}-{prefill.setup.name}", 900 + 1000 * i
        streams = [Asked(f"{name}-stream-{i}-x", ids(seed + i, 100), 150, 0.0) for i in range(2)]
        streams[1].sampling = FEATURES[0]
        # Within one chunk, and in several.
        prompts = [ids(seed + 10 + i, 950 if i % 2 else 2500) for i in range(24)]
        aborted = [
            Asked(f"{name}-{i}-x", p, 4, 0.1 + 0.1 * i, leaves_s=0.1 * rng.random(), aborts=True)
            for i, p in enumerate(prompts)
        ]
        asyncio.run(at_once(prefill, [*streams, *aborted]))
        abandoned = prefill.get("/laps_status")["decode"]["abandoned_passes"]
        must_be_right([*streams[:1], *aborted], reference)
        gone = [a for a in aborted if not a.tokens]
        assert all(a.end is None or a.end["type"] == "abort" for a in gone)
        # Their prefixes, if they are cached at all, are whole.
        must_be_right(alone(prefill, gone[:6]), reference)
        must_be_as(streams[1:], alone(prefill, streams[1:]))
        prefill.all_tokens_are_free()
        return abandoned > before and bool(gone)

    until_seen(once, "a prompt is aborted in a pause")
