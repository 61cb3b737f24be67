"""Servers that prefill and decode: prefill batches carry rows of streams, and every token is the same as alone."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from rounds import ROUNDS, repeat_until
from served import Prefill, Reference, random_prompt, run_on

from .colocated import (
    FEATURES,
    GRAMMARS,
    SETUPS,
    Request,
    mixed_requests,
    require_equal_answers,
    require_right_answers,
    send_again,
    send_all_at_their_times,
)

SELDOM = [tuple(a.replace('"tbt_ms": 1.0', '"tbt_ms": 300.0') for a in s.args) for s in SETUPS]
"""Arguments under which decode steps are seldom due, because batches end before tokens are late."""
WITH_ROWS = [
    replace(s, name=f"{s.name}-rows", args=(*args, "--enable-mixed-chunk")[: len(args) + i % 2])
    for i, (s, args) in enumerate(zip(SETUPS, SELDOM, strict=True))
]
"""Servers that mix rows into batches if that pays, with SGLang's flag and without."""
pytestmark = [pytest.mark.timeout(1200), *run_on(*WITH_ROWS)]


def count_carried_steps(prefill: Prefill) -> int:
    return int(prefill.get("/laps_status")["decode"]["steps_carried"])


def send_mixed_load(prefill: Prefill, name: str, seed: int) -> None:
    """Send mixed load, whose steps the latency model learns."""
    asyncio.run(send_all_at_their_times(prefill, mixed_requests(seed, 24, f"{name}-{prefill.setup.name}", 1.0)))


def send_until_fitted(prefill: Prefill, name: str) -> None:
    """Send mixed load until the latency model is fitted."""
    for i in range(ROUNDS):
        if prefill.get("/laps_status")["latency_model"]["fitted"]:
            return
        send_mixed_load(prefill, f"{name}-{i}", 60 + i)
    pytest.fail(str(prefill.get("/laps_status")["latency_model"]))


def serve_until_rows_run(prefill: Prefill, make: Callable[[str], list[Request]]) -> list[Request]:
    """Serve the requests of ``make`` repeatedly until some ran as rows, and return the last ones. Rows run if they pay
    according to measured times, which vary on a busy machine."""
    name = f"rows-{prefill.setup.name}-{random.getrandbits(40)}"
    send_until_fitted(prefill, f"{name}-ready")
    before = count_carried_steps(prefill)
    requests: list[Request] = []

    def attempt(i: int) -> bool:
        if i:
            # Rows do not pay while the model takes a step's fixed time for 0, as it may on a busy machine.
            send_mixed_load(prefill, f"{name}-{i}-again", 80 + i)
        # Rows of few streams are cheap. On a slow machine streams last longer, so more of them run at once.
        requests[:] = [replace(a, at_s=a.at_s * (1 + i % ROUNDS)) for a in make(f"{name}-{i}")]
        asyncio.run(send_all_at_their_times(prefill, requests))
        prefill.require_all_tokens_free()
        return count_carried_steps(prefill) > before

    repeat_until(attempt, "rows run", lambda: prefill.get("/laps_status")["decode"], 2 * ROUNDS)
    return requests


def requests_of_every_kind(name: str) -> list[Request]:
    """Return streams (one is aborted, some end while their rows run), short prompts and long prompts.

    Contexts are small: a CPU's attention computes the whole context of a row, so rows of large contexts do not pay.
    """
    rng = random.Random(11)
    streams = [Request(f"{name}-stream-{i}-x", random_prompt(1100 + i, 6 + i), 60 + 5 * i, 0.5 * i) for i in range(8)]
    for s, sampling in zip(streams[::2], (*FEATURES, GRAMMARS[0]), strict=True):
        s.sampling = sampling
    streams[1].leaves_after_s, streams[1].aborts = 1.0, True
    prompts = [random_prompt(1200 + i, rng.randint(10, 250)) for i in range(30)]
    shorts = [Request(f"{name}-{i}-x", p, rng.randint(1, 8), 0.5 + 0.1 * i) for i, p in enumerate(prompts)]
    for s, sampling in zip(shorts[::6], (*FEATURES, *GRAMMARS), strict=False):
        s.sampling, s.new = sampling, 60 if "frequency_penalty" not in sampling else 12
    longs = [Request(f"{name}-long-{i}-x", random_prompt(1300 + i, 2500), 4, 1.0 + i) for i in range(2)]
    return [*streams, *shorts, *longs]


def test_tokens_are_correct_when_batches_carry_stream_rows(prefill: Prefill, reference: Reference) -> None:
    """Includes streams with penalties and with a grammar; no stream returns log-probabilities."""
    requests = serve_until_rows_run(prefill, requests_of_every_kind)
    plain = [a for a in requests if not a.sampling]
    require_right_answers(plain, reference)
    prefill.require_all_tokens_free()
    other = [a for a in requests if a.sampling]
    require_equal_answers(other, send_again(prefill, other, clients=5))
    prefill.require_all_tokens_free()


def test_streams_with_logprobs_are_not_carried_in_batches(prefill: Prefill) -> None:
    name = f"rows-logprobs-{prefill.setup.name}"
    send_until_fitted(prefill, f"{name}-ready")
    before = count_carried_steps(prefill)
    requests = [Request(f"{name}-{i}-x", random_prompt(1400 + i, 60), 40, 0.1 * i, logprobs=True) for i in range(10)]
    asyncio.run(send_all_at_their_times(prefill, requests))
    assert count_carried_steps(prefill) == before
    require_equal_answers(requests, send_again(prefill, requests, clients=5))
    prefill.require_all_tokens_free()
