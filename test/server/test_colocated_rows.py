"""Servers that prefill and decode: prefill batches carry rows of streams, and every token is the same as alone."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from rounds import ROUNDS, until_seen
from served import Prefill, Reference, ids, on

from .colocated import FEATURES, GRAMMARS, SETUPS, Asked, alone, at_once, mixed, must_be_as, must_be_right

SELDOM = [tuple(a.replace('"tbt_ms": 1.0', '"tbt_ms": 300.0') for a in s.args) for s in SETUPS]
"""Arguments under which decode steps are seldom due, because batches end before tokens are late."""
WITH_ROWS = [
    replace(s, name=f"{s.name}-rows", args=(*args, "--enable-mixed-chunk")[: len(args) + i % 2])
    for i, (s, args) in enumerate(zip(SETUPS, SELDOM, strict=True))
]
"""Servers that mix rows into batches if that pays, with SGLang's flag and without."""
pytestmark = [pytest.mark.timeout(600), *on(*WITH_ROWS)]


def carried(prefill: Prefill) -> int:
    return int(prefill.get("/laps_status")["decode"]["steps_carried"])


def ready(prefill: Prefill, name: str) -> None:
    """Send mixed load until the latency model is fitted."""
    for i in range(ROUNDS):
        if prefill.get("/laps_status")["latency_model"]["fitted"]:
            return
        asyncio.run(at_once(prefill, mixed(60 + i, 24, f"{name}-{i}-{prefill.setup.name}", 1.0)))
    pytest.fail(str(prefill.get("/laps_status")["latency_model"]))


def until_rows_run(prefill: Prefill, make: Callable[[str], list[Asked]]) -> list[Asked]:
    """Serve the requests of ``make`` repeatedly until some ran as rows, and return the last ones. Rows run if they pay
    according to measured times, which vary on a busy machine."""
    name = f"rows-{prefill.setup.name}-{random.getrandbits(40)}"
    ready(prefill, f"{name}-ready")
    before = carried(prefill)
    asked: list[Asked] = []

    def once(i: int) -> bool:
        # Rows of few streams are cheap. On a slow machine streams last longer, so more of them run at once.
        asked[:] = [replace(a, at_s=a.at_s * (1 + i)) for a in make(f"{name}-{i}")]
        asyncio.run(at_once(prefill, asked))
        prefill.all_tokens_are_free()
        return carried(prefill) > before

    until_seen(once, "rows run", lambda: prefill.get("/laps_status")["decode"])
    return asked


def every_kind(name: str) -> list[Asked]:
    """Return streams (one is aborted, some end while their rows run), short prompts and long prompts.

    Contexts are small: a CPU's attention computes the whole context of a row, so rows of large contexts do not pay.
    """
    rng = random.Random(11)
    streams = [Asked(f"{name}-stream-{i}-x", ids(1100 + i, 6 + i), 60 + 5 * i, 0.5 * i) for i in range(8)]
    for s, sampling in zip(streams[::2], (*FEATURES, GRAMMARS[0]), strict=True):
        s.sampling = sampling
    streams[1].leaves_s, streams[1].aborts = 1.0, True
    prompts = [ids(1200 + i, rng.randint(10, 250)) for i in range(30)]
    shorts = [Asked(f"{name}-{i}-x", p, rng.randint(1, 8), 0.5 + 0.1 * i) for i, p in enumerate(prompts)]
    for s, sampling in zip(shorts[::6], (*FEATURES, *GRAMMARS), strict=False):
        s.sampling, s.new = sampling, 60 if "frequency_penalty" not in sampling else 12
    longs = [Asked(f"{name}-long-{i}-x", ids(1300 + i, 2500), 4, 1.0 + i) for i in range(2)]
    return [*streams, *shorts, *longs]


def test_short_batches_carry_streams_of_every_kind(prefill: Prefill, reference: Reference) -> None:
    """Includes streams with penalties and with a grammar; no stream returns log-probabilities."""
    asked = until_rows_run(prefill, every_kind)
    plain = [a for a in asked if not a.sampling]
    must_be_right(plain, reference)
    prefill.all_tokens_are_free()
    other = [a for a in asked if a.sampling]
    must_be_as(other, alone(prefill, other, clients=5))
    prefill.all_tokens_are_free()


def test_streams_with_log_probabilities_have_steps_of_their_own(prefill: Prefill) -> None:
    name = f"rows-logprobs-{prefill.setup.name}"
    ready(prefill, f"{name}-ready")
    before = carried(prefill)
    asked = [Asked(f"{name}-{i}-x", ids(1400 + i, 60), 40, 0.1 * i, logprobs=True) for i in range(10)]
    asyncio.run(at_once(prefill, asked))
    assert carried(prefill) == before
    must_be_as(asked, alone(prefill, asked, clients=5))
    prefill.all_tokens_are_free()
