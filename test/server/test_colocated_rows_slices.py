"""Parts of long prompts that carry rows run in slices, with short batches in their pauses, and every token is right."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

import pytest
from rounds import repeat_until
from served import LAPS, Prefill, Reference, Setup, run_on

from benchmark.rig import devices

from .colocated import (
    COUNT,
    LOOPS,
    Request,
    abort_some,
    add_features,
    mixed_requests,
    require_equal_answers,
    require_right_answers,
    send_again,
    send_all_at_their_times,
)
from .slicing import SHAPE

EAGER = Path(__file__).parents[1] / "support" / "eager_rows"
ENV = devices.with_path({}, EAGER)
"""Environment that makes ``eager_rows`` a plugin of SGLang."""
ARGS = (
    *("--chunked-prefill-size", "1024", "--max-total-tokens", "5600", "--schedule-conservativeness", "0.01"),
    *("--grammar-backend", "xgrammar"),
    *("--laps-config", json.dumps({"slice_ms": 0.01, "preempt_overhead": 1.0, "tbt_ms": 2000.0})),
)
"""Arguments for a pause after each layer. Separate decode steps are seldom due, so that rows run instead."""
pytestmark = [
    pytest.mark.timeout(600 + 5 * COUNT),
    *run_on(
        *(Setup(f"rows-slices-{n}", (*LAPS, *ARGS, *flags), ENV, SHAPE, mode="null") for n, flags in LOOPS.items())
    ),
]


def requests_of_round(i: int, name: str) -> list[Request]:
    """Return mixed requests of which many end while a pass carries their row."""
    requests, rng = mixed_requests(300 + 100 * i, 2 * COUNT, f"{name}-{i}", COUNT / 12), random.Random(i)
    for a in requests:
        if len(a.prompt) < 1000:
            a.new = rng.randint(2, 30)
    abort_some(requests, rng)
    return requests


def test_tokens_are_correct_with_short_batches_beside_rows(prefill: Prefill, reference: Reference) -> None:
    """A third of the clients leave or abort; some requests have penalties, a grammar or log-probabilities."""
    before = prefill.get("/laps_status")

    def attempt(i: int) -> bool:
        requests = requests_of_round(i, prefill.setup.name)
        other = add_features(random.Random(i).sample(requests, COUNT // 4))
        asyncio.run(send_all_at_their_times(prefill, requests))
        require_right_answers([a for a in requests if a not in other], reference)
        prefill.require_all_tokens_free()
        after = prefill.get("/laps_status")
        assert after["enabled"], after["reason"]
        assert after["in_progress"] == 0
        carried = after["decode"]["steps_carried"] - before["decode"]["steps_carried"]
        preempted = after["preemption"]["by_short_batches"] - before["preemption"]["by_short_batches"]
        # A row that is overwritten does not show in every round.
        if i < 2 or carried < COUNT // 2 or preempted < COUNT // 4:
            return False
        require_equal_answers(other, send_again(prefill, other))
        prefill.require_all_tokens_free()
        return True

    repeat_until(attempt, "short batches run beside rows", lambda: prefill.get("/laps_status")["decode"])
