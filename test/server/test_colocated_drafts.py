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
from rounds import until_seen
from served import LAPS, NORMAL_LOOP, Prefill, Reference, Setup, ids, on, started
from sglang_laps import compat

from .colocated import (
    EVERY_PAUSE,
    FEATURES,
    GRAMMARS,
    MANY,
    TWO_CORES,
    TWO_RANKS,
    Asked,
    alone,
    at_once,
    mixed,
    must_be_as,
    must_be_right,
    some_leave,
    until_streams_are_retracted,
)
from .slicing import SHAPE
from .test_architectures import CHAIN, layers_args

COUNT = int(os.environ.get(MANY, "18"))
TREE = ("--speculative-num-steps", "3", "--speculative-eagle-topk", "2", "--speculative-num-draft-tokens", "6")


def follower_args(base: Path) -> list[str]:
    made = adapters.follower(base.parent, base)
    return ["--speculative-algorithm", "EAGLE", "--speculative-draft-model-path", str(made)]


def eagle3_args(base: Path) -> list[str]:
    made, steps = adapters.eagle3(base.parent, base), base.parent / "adaptive.json"
    steps.write_text(json.dumps({n: {"candidate_steps": [i]} for i, n in enumerate(("1", "2", "4", "6"))}))
    args = ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(made)]
    return [*args, "--speculative-adaptive", "--speculative-adaptive-config", str(steps)]


def standalone_args(base: Path) -> list[str]:
    return ["--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", str(base)]


def next_tokens_args(base: Path) -> list[str]:
    return ["--speculative-draft-model-path", str(adapters.next_tokens(base.parent, base))]


def served(
    name: str, *flags: str, more: Callable[[Path], list[str]] = follower_args, heads: int = 1, env: Any = None
) -> Setup:
    args, shape = (*LAPS, *EVERY_PAUSE, *flags), replace(SHAPE, embedding=60.0, kv_heads=heads)
    return Setup(f"colocated-drafts-{name}", args, env or {}, shape, more, mode="null")


NEXTN = Setup(
    "colocated-drafts-nextn",
    (*LAPS, *EVERY_PAUSE, *CHAIN, "--speculative-algorithm", "NEXTN"),
    shape="glm4moe",
    mode="null",
)
STATES, STATES_TREE = (
    Setup(
        f"colocated-drafts-states{name}",
        (*LAPS, *EVERY_PAUSE, *flags, "--speculative-algorithm", "NEXTN"),
        shape="qwen3next",
        more=next_tokens_args,
        mode="null",
    )
    for name, flags in (("", CHAIN), ("-tree", (*TREE, *NORMAL_LOOP)))
)
"""Servers whose target has mostly layers of linear attention, which keep a state for each token of a draft."""
SEVERAL_LAYERS = Setup(
    "colocated-drafts-mimov2",
    (*LAPS, *EVERY_PAUSE, *CHAIN),
    shape="mimov2",
    more=layers_args,
    mode="null",
)
"""Servers whose draft has a layer for each further token; these layers and most target layers see only a window."""
FITTED = (
    *(served("normal", *CHAIN, *NORMAL_LOOP), served("overlap", *CHAIN), served("tree", *TREE)),
    STATES,
    SEVERAL_LAYERS,
    *((served("tp2", *CHAIN, *TWO_RANKS, heads=2, env=TWO_CORES),) if MANY in os.environ else ()),
)
"""Servers whose draft is often right."""
WINDOWS = Setup("colocated-drafts-eagle3", (*LAPS, *EVERY_PAUSE, *CHAIN), {}, "gptoss", eagle3_args, mode="null")
"""Server whose target has sliding-window attention, with its own KV pool, in half of the layers. The length of
drafts, and with it the target's attention backend, changes with the number of streams."""
SETUPS = (*FITTED, STATES_TREE, WINDOWS, served("standalone", *CHAIN, more=standalone_args), NEXTN)
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


@on(*SETUPS)[0]
def test_every_token_is_right_whatever_runs_in_the_pauses(prefill: Prefill, reference: Reference) -> None:
    """A third of the clients leave or abort."""
    before = status(prefill)

    def once(i: int) -> bool:
        asked = mixed(100 * i + 1, COUNT, f"{prefill.setup.name}-{i}", COUNT / 12)
        some_leave(asked, random.Random(2))
        asyncio.run(at_once(prefill, asked))
        must_be_right(asked, reference)
        prefill.all_tokens_are_free()
        after = status(prefill)
        return after[0] > before[0] and after[1] > before[1]

    until_seen(once, "steps and short batches run in pauses")


@on(*FITTED)[0]
def test_features_are_those_of_a_stock_server_one_at_a_time(prefill: Prefill, tmp_path: Path) -> None:
    """The number of steps of each answer is also the same, so the draft model's KV is complete."""
    # A negative penalty favours repeated tokens and so shows each count; otherwise hardly a token repeats.
    features: tuple[dict[str, Any], ...] = (*FEATURES, *GRAMMARS[:2], {}, {"frequency_penalty": -2.0})
    asked = mixed(3, 18, f"features-{prefill.setup.name}", 1.0)
    for i, a in enumerate(asked):
        a.sampling, a.logprobs, a.new = dict(features[i % len(features)]), i % len(features) == 5, 30
    asyncio.run(at_once(prefill, asked))
    prefill.all_tokens_are_free()
    own, at = prefill.setup, prefill.setup.args.index("--laps-config")
    flags = tuple(a for a in (*own.args[:at], *own.args[at + 2 :]) if a not in LAPS)
    with started(replace(own, name=f"{own.name}-stock", args=flags), tmp_path) as stock:
        expected = alone(stock, asked)
    must_be_as(asked, expected)
    assert sum(a.steps for a in asked) == pytest.approx(sum(a.steps for a in expected), rel=0.02)
    assert sum(a.steps for a in expected) < 0.9 * sum(len(a.tokens) for a in expected), "no draft is right"


@on(*FITTED)[0]
def test_grammars_go_on_in_the_pauses_of_the_batch_that_follows(prefill: Prefill) -> None:
    """In the overlap loop the result of the grammar's prompt is still queued when the following batch starts."""
    name, asked = f"grammar-{prefill.setup.name}", list[Asked]()
    for i in range(6):
        asked.append(Asked(f"{name}-{i}-x", ids(700 + i, 60), 60, 0.4 * i, sampling=dict(GRAMMARS[i % 2])))
        asked.append(Asked(f"{name}-{i}-long-x", ids(720 + i, 1900), 4, 0.4 * i))
    asyncio.run(at_once(prefill, asked))
    must_be_as(asked, alone(prefill, asked))
    prefill.all_tokens_are_free()


@on(*FITTED)[0]
def test_streams_are_retracted_where_memory_runs_out(prefill: Prefill, reference: Reference) -> None:
    until_streams_are_retracted(prefill, reference)


@on(*SETUPS)[0]
def test_an_abort_ends_a_paused_prompt_at_its_next_pause(prefill: Prefill, reference: Reference) -> None:
    before = status(prefill)[2]

    def once(i: int) -> bool:
        rng, name, seed = random.Random(4), f"mid-pass-{i}-{prefill.setup.name}", 900 + 1000 * i
        streams = [Asked(f"{name}-stream-{i}-x", ids(seed + i, 100), 150, 0.0) for i in range(2)]
        prompts = [ids(seed + 10 + i, 950 if i % 2 else 2500) for i in range(24)]
        aborted = [
            Asked(f"{name}-{i}-x", p, 4, 0.1 + 0.1 * i, leaves_s=0.1 * rng.random(), aborts=True)
            for i, p in enumerate(prompts)
        ]
        asyncio.run(at_once(prefill, [*streams, *aborted]))
        must_be_right([*streams, *aborted], reference)
        gone = [a for a in aborted if not a.tokens]
        must_be_right(alone(prefill, gone[:6]), reference)
        prefill.all_tokens_are_free()
        return status(prefill)[2] > before and bool(gone)

    until_seen(once, "a prompt is aborted in a pause")
