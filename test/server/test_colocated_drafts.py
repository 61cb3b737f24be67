"""Servers that prefill and decode with a draft model: they draft and verify in the pauses of long prompts, and every
token is the same as without load."""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import adapters
import pytest
from rounds import repeat_until
from served import LAPS, NORMAL_LOOP, Prefill, Reference, Setup, random_prompt, run_on, run_prefill_server
from sglang_laps import compat

from .colocated import (
    COUNT_VARIABLE,
    FEATURES,
    FREQUENT_PAUSES,
    GRAMMARS,
    TWO_CORES,
    TWO_RANKS,
    Request,
    abort_some,
    mixed_requests,
    prompts_that_leave,
    require_equal_answers,
    require_right_answers,
    send_again,
    send_all_at_their_times,
    serve_until_streams_are_retracted,
)
from .slicing import SHAPE
from .test_architectures import CHAIN, layers_args

COUNT = int(os.environ.get(COUNT_VARIABLE, "18"))
TREE = ("--speculative-num-steps", "3", "--speculative-eagle-topk", "2", "--speculative-num-draft-tokens", "6")


def fitted_draft_args(base: Path) -> list[str]:
    made = adapters.make_fitted_draft(base.parent, base)
    return ["--speculative-algorithm", "EAGLE", "--speculative-draft-model-path", str(made)]


def eagle3_args(base: Path) -> list[str]:
    made, steps = adapters.make_eagle3_draft(base.parent, base), base.parent / "adaptive.json"
    steps.write_text(json.dumps({n: {"candidate_steps": [i]} for i, n in enumerate(("1", "2", "4", "6"))}))
    args = ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(made)]
    return [*args, "--speculative-adaptive", "--speculative-adaptive-config", str(steps)]


def standalone_args(base: Path) -> list[str]:
    return ["--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", str(base)]


def mtp_args(base: Path) -> list[str]:
    return ["--speculative-draft-model-path", str(adapters.make_mtp_layer(base.parent, base))]


def make_setup(
    name: str, *flags: str, extra_args: Callable[[Path], list[str]] = fitted_draft_args, heads: int = 1, env: Any = None
) -> Setup:
    args, shape = (*LAPS, *FREQUENT_PAUSES, *flags), replace(SHAPE, embedding=60.0, kv_heads=heads)
    return Setup(f"colocated-drafts-{name}", args, env or {}, shape, extra_args, mode="null")


NEXTN = Setup(
    "colocated-drafts-nextn",
    (*LAPS, *FREQUENT_PAUSES, *CHAIN, "--speculative-algorithm", "NEXTN"),
    shape="glm4moe",
    mode="null",
)
STATES, STATES_TREE = (
    Setup(
        f"colocated-drafts-states{name}",
        (*LAPS, *FREQUENT_PAUSES, *flags, "--speculative-algorithm", "NEXTN"),
        shape="qwen3next",
        extra_args=mtp_args,
        mode="null",
    )
    for name, flags in (("", CHAIN), ("-tree", (*TREE, *NORMAL_LOOP)))
)
"""Servers whose target has mostly layers of linear attention, which keep a state for each token of a draft."""
SEVERAL_LAYERS = Setup(
    "colocated-drafts-mimov2",
    (*LAPS, *FREQUENT_PAUSES, *CHAIN),
    shape="mimov2",
    extra_args=layers_args,
    mode="null",
)
"""Servers whose draft has a layer for each further token; these layers and most target layers see only a window."""
FITTED = (
    *(make_setup("normal", *CHAIN, *NORMAL_LOOP), make_setup("overlap", *CHAIN), make_setup("tree", *TREE)),
    STATES,
    SEVERAL_LAYERS,
    *((make_setup("tp2", *CHAIN, *TWO_RANKS, heads=2, env=TWO_CORES),) if COUNT_VARIABLE in os.environ else ()),
)
"""Servers whose draft is often right."""
WINDOWS = Setup("colocated-drafts-eagle3", (*LAPS, *FREQUENT_PAUSES, *CHAIN), {}, "gptoss", eagle3_args, mode="null")
"""Server whose target has sliding-window attention, with its own KV pool, in half of the layers. The length of
drafts, and with it the target's attention backend, changes with the number of streams."""
SETUPS = (*FITTED, STATES_TREE, WINDOWS, make_setup("standalone", *CHAIN, extra_args=standalone_args), NEXTN)
pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("clean"),
    pytest.mark.skipif(not compat.release().drafts_in_pauses, reason="no drafts in pauses on this release"),
]


def status(prefill: Prefill) -> tuple[int, int, int]:
    """Return the numbers of decode steps in pauses, of preemptions by short batches, and of abandoned passes."""
    said = prefill.get("/laps_status")
    assert said["enabled"], said["reason"]
    decode = said["decode"]
    assert decode["steps_carried"] == 0
    return decode["steps_in_pauses"], said["preemption"]["by_short_batches"], decode["abandoned_passes"]


@run_on(*SETUPS)[0]
def test_tokens_are_correct_with_steps_and_batches_in_pauses(prefill: Prefill, reference: Reference) -> None:
    """A third of the clients leave or abort."""
    before = status(prefill)

    def attempt(i: int) -> bool:
        requests = mixed_requests(100 * i + 1, COUNT, f"{prefill.setup.name}-{i}", COUNT / 12)
        abort_some(requests, random.Random(2))
        asyncio.run(send_all_at_their_times(prefill, requests))
        require_right_answers(requests, reference)
        prefill.require_all_tokens_free()
        after = status(prefill)
        return after[0] > before[0] and after[1] > before[1]

    repeat_until(attempt, "steps and short batches run in pauses")


@run_on(*FITTED)[0]
def test_sampling_features_equal_sequential_answers_of_stock_server(prefill: Prefill, tmp_path: Path) -> None:
    """The number of steps of each answer is also the same, so the draft model's KV is complete."""
    # A negative penalty favours repeated tokens and so shows each count; otherwise hardly a token repeats.
    features: tuple[dict[str, Any], ...] = (*FEATURES, *GRAMMARS[:2], {}, {"frequency_penalty": -2.0})
    requests = mixed_requests(3, 18, f"features-{prefill.setup.name}", 1.0)
    for i, a in enumerate(requests):
        a.sampling, a.logprobs, a.new = dict(features[i % len(features)]), i % len(features) == 5, 30
    asyncio.run(send_all_at_their_times(prefill, requests))
    prefill.require_all_tokens_free()
    own, at = prefill.setup, prefill.setup.args.index("--laps-config")
    flags = tuple(a for a in (*own.args[:at], *own.args[at + 2 :]) if a not in LAPS)
    with run_prefill_server(replace(own, name=f"{own.name}-stock", args=flags), tmp_path) as stock:
        expected = send_again(stock, requests)
    require_equal_answers(requests, expected)
    assert sum(a.steps for a in requests) == pytest.approx(sum(a.steps for a in expected), rel=0.02)
    assert sum(a.steps for a in expected) < 0.9 * sum(len(a.tokens) for a in expected), "no draft is right"


@run_on(*FITTED)[0]
def test_grammar_answers_under_load_equal_sequential_answers(prefill: Prefill) -> None:
    """In the overlap loop the result of the grammar's prompt is still queued when the following batch starts."""
    name, requests = f"grammar-{prefill.setup.name}", list[Request]()
    for i in range(6):
        requests.append(
            Request(f"{name}-{i}-x", random_prompt(700 + i, 60), 60, 0.4 * i, sampling=dict(GRAMMARS[i % 2]))
        )
        requests.append(Request(f"{name}-{i}-long-x", random_prompt(720 + i, 1900), 4, 0.4 * i))
    asyncio.run(send_all_at_their_times(prefill, requests))
    require_equal_answers(requests, send_again(prefill, requests))
    prefill.require_all_tokens_free()


@run_on(*FITTED)[0]
def test_streams_are_retracted_when_memory_runs_out(prefill: Prefill, reference: Reference) -> None:
    serve_until_streams_are_retracted(prefill, reference)


@run_on(*SETUPS)[0]
def test_abort_ends_paused_prompt_at_next_pause(prefill: Prefill, reference: Reference) -> None:
    before = status(prefill)[2]

    def attempt(i: int) -> bool:
        name, seed = f"mid-pass-{i}-{prefill.setup.name}", 900 + 1000 * i
        streams = [Request(f"{name}-stream-{i}-x", random_prompt(seed + i, 100), 150, 0.0) for i in range(2)]
        aborted = prompts_that_leave(name, seed + 10, i)
        asyncio.run(send_all_at_their_times(prefill, [*streams, *aborted]))
        require_right_answers([*streams, *aborted], reference)
        gone = [a for a in aborted if not a.tokens]
        require_right_answers(send_again(prefill, gone[:6]), reference)
        prefill.require_all_tokens_free()
        return status(prefill)[2] > before and bool(gone)

    repeat_until(attempt, "a prompt is aborted in a pause")
