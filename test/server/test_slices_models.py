"""Every architecture under LAPS, paused at every operator: first tokens and probabilities equal those of transformers.

The table of models in docs/LAPS.md lists where the passes of each architecture are paused; this file checks the table.
"""

from __future__ import annotations

import asyncio
import base64
import os
import random
import re
from pathlib import Path
from typing import Any

import architectures
import http_load as load
import more_models
import pytest
from rounds import until_seen
from served import NORMAL_LOOP, Prefill, Reference, Setup, ids, on
from sglang_laps import compat

from .slicing import CACHED, EVERY_LAYER, LAPS, ask, post, preemptions, until_slices_run
from .test_architectures import (
    CHAIN,
    DP_ATTENTION,
    ONE_STEP,
    TWO_CORES,
    eagle_args,
    layers_args,
    lora_args,
    must_be,
    with_adapters,
)

DOCS = Path(__file__).parents[2] / "docs" / "LAPS.md"
TP2 = ("--tp-size", "2")
WINDOWED = ("gemma2", "gptoss", "mimov2")
"""Architectures with sliding-window attention; their long prompts run in several chunks, too."""
NAMES = architectures.NAMES
FLAGS = {"qwen3moe": ("--enable-return-routed-experts",)}
"""Further flags of an architecture's server."""


def served(architecture: str, *args: str, name: str = "", env: dict[str, str] | None = None, **more: Any) -> Setup:
    """Return the setup of a server that pauses as often as possible."""
    chunk = "1024" if architecture in WINDOWED else "4096"
    every = (*LAPS, *EVERY_LAYER, "--chunked-prefill-size", chunk, *args)
    return Setup(f"slices-{architecture}{name}", every, {**CACHED, **(env or {})}, architecture, **more)


LOOPS = (
    lambda n: served(n, *FLAGS.get(n, ())),
    lambda n: served(n, *FLAGS.get(n, ()), *NORMAL_LOOP, name="-normal"),
)
PLAIN = tuple(LOOPS[i % 2](n) for i, n in enumerate(NAMES))
OTHER = tuple(LOOPS[1 - i % 2](n) for i, n in enumerate(NAMES)) if os.environ.get("LAPS_BOTH_LOOPS") else ()
"""Second event loop of each architecture, with LAPS_BOTH_LOOPS=1; otherwise architectures alternate between loops."""
EXCHANGES = compat.installed() == list(compat.RELEASES)[-1]
"""True if the host platform has an exchange of tokens between experts for this release of SGLang."""
EXCHANGE = ("--moe-a2a-backend", "deepep", "--deepep-mode", "normal")
PLACED = ("--enable-eplb", "--eplb-rebalance-num-iterations", "40", "--expert-distribution-recorder-buffer-size", "40")
"""Arguments for a new placement of experts every 40 passes."""
DENSE = ("--moe-dense-tp-size", "1", "--enable-dp-lm-head")
EXPERTS = (*EXCHANGE, *DENSE, "--enable-two-batch-overlap", *PLACED) if EXCHANGES else ()
"""Arguments without gathering: each rank computes its own tokens, which reach the experts through an exchange."""
COUNTED = served(
    "qwen3moe",
    *(*TP2, *EXCHANGE, "--expert-distribution-recorder-mode", "stat"),
    *("--expert-distribution-recorder-buffer-size", "1000"),
    name="-tp2-experts",
    env=TWO_CORES,
)
RANKS = (
    *(served(n, *TP2, name="-tp2", env=TWO_CORES) for n in ("deepseek3", "gptoss")),
    *([COUNTED] if EXCHANGES else []),
)
DRAFTS = (
    served("qwen2", *ONE_STEP, "EAGLE", name="-eagle", more=eagle_args),
    served("deepseek3", *ONE_STEP, "NEXTN", *NORMAL_LOOP, name="-nextn"),
    served("mimov2", *CHAIN, name="-eagle", more=layers_args),
)
ADAPTERS = (served("qwen2", "--max-loras-per-batch", "3", name="-lora", more=lora_args),)
TOGETHER = (
    served("deepseek3", *DP_ATTENTION, name="-dp", env=TWO_CORES),
    served("deepseek3", *DP_ATTENTION, *EXPERTS, *ONE_STEP, "NEXTN", name="-dp-nextn", env=TWO_CORES),
)


def crowd(rng: random.Random) -> list[list[int]]:
    """Return a document, long prompts, and short prompts to send while these run; some start with the document."""
    document = ids(77, 700)
    longs = [ids(10 + i, n) for i, n in enumerate((1600, 1100, 2200))] + [[*document, *ids(14, 600)]]
    shorts = [ids(100 + i, rng.randint(5, 200)) for i in range(14)]
    return [document, *longs, *shorts, *([*document, *ids(130 + i, 9)] for i in range(2))]


async def answers(prefill: Prefill, prompts: list[list[int]], **fields: list[Any]) -> list[dict[str, Any]]:
    """Send the first prompt alone, then the long ones, then the short ones once a long batch runs; return answers."""
    rng, short_s = random.Random(3), 0.0

    async def one(http: Any, i: int) -> dict[str, Any]:
        body = {**ask(prompts[i]), "return_logprob": True, **{k: v[i] for k, v in fields.items()}}
        status, answer, _ = await post(http, prefill, body, short_s * rng.random())
        assert status == 200, answer
        return dict(answer)

    async with load.session() as http:
        first = await one(http, 0)
        everybody = range(1, len(prompts))
        sent = {i: asyncio.ensure_future(one(http, i)) for i in everybody if len(prompts[i]) > 800}
        await until_slices_run(http, prefill, asyncio.gather(*sent.values()))
        short_s = 0.3
        sent |= {i: asyncio.ensure_future(one(http, i)) for i in everybody if i not in sent}
        return [first, *[await sent[i] for i in everybody]]


async def steps_of_many_sizes(prefill: Prefill) -> bool:
    """Send pairs of prompts, one for each DP rank, until both ranks know their step times; False if they never do."""
    async with load.session() as http:
        for i in range(200):
            sizes = (20 + 37 * i % 230, 20 + 91 * i % 230)
            both = [ask(ids(50_000 + 2 * i + r, n)) for r, n in enumerate(sizes)]
            sent = (post(http, prefill, {**b, "routed_dp_rank": r}, 0.0) for r, b in enumerate(both))
            assert [status for status, *_ in await asyncio.gather(*sent)] == [200, 200]
            if i % 10 == 9 and all(r["group"]["fitted"] for r in prefill.get("/laps_status")["ranks"]):
                return True
    return False


@on(*PLAIN, *OTHER, *RANKS, *DRAFTS)[0]
@on(*PLAIN)[1]
def test_first_tokens_are_those_of_transformers(prefill: Prefill, reference: Reference) -> None:
    prompts = crowd(random.Random(5))

    def once(_: int) -> bool:
        got = asyncio.run(answers(prefill, prompts))
        for prompt, answer in zip(prompts, got, strict=True):
            must_be(reference.first(prompt), answer, prompt)
        prefill.all_tokens_are_free()  # a prompt that is cached has no slices
        return preemptions(prefill) > 0

    until_seen(once, "a batch preempts")


@on(*TOGETHER)[0]
@on(*TOGETHER)[1]
def test_ranks_that_meet_in_every_layer_have_one_plan_and_pause_together(
    prefill: Prefill, reference: Reference
) -> None:
    known = asyncio.run(steps_of_many_sizes(prefill))
    assert known, "times of steps are not learnt"
    prompts = crowd(random.Random(5))
    ranks = [i % 2 for i in range(len(prompts))]
    for _ in range(8):  # until a step has preempted another
        got = asyncio.run(answers(prefill, prompts, routed_dp_rank=ranks))
        for prompt, answer in zip(prompts, got, strict=True):
            must_be(reference.first(prompt), answer, prompt)
        prefill.all_tokens_are_free()
        said = [r["group"] for r in prefill.get("/laps_status")["ranks"]]
        if said[0]["preemptions"]:
            break
    assert said[0]["preemptions"] == said[1]["preemptions"] > 0, said
    assert said[0]["steps"] == said[1]["steps"] > 0, "a rank's step is the other's"
    assert prefill.server.alive()


@pytest.mark.skipif(not EXCHANGES, reason="no exchange between experts on this release")
@on(COUNTED)[0]
@on(COUNTED)[1]
def test_choices_of_experts_are_counted_by_pass(prefill: Prefill, reference: Reference) -> None:
    prompts = crowd(random.Random(7))

    def tell(what: str) -> None:
        prefill.post(f"/{what}_expert_distribution_record", {})

    def once(_: int) -> bool:
        before = preemptions(prefill)
        tell("start")
        answered = asyncio.run(answers(prefill, prompts))
        tell("stop")
        tell("dump")
        paths = re.findall(r"Write expert distribution to (\S+)", prefill.server.log.read_text())
        counts = reference.torch.load(paths[-1])["logical_count"].sum(0).sum(-1)
        Path(paths[-1]).unlink()
        tokens = sum(len(p) - a["meta_info"]["cached_tokens"] for p, a in zip(prompts, answered, strict=True))
        assert (counts == 2 * tokens).all(), f"{counts} of {tokens} tokens with two experts each"
        prefill.all_tokens_are_free()  # a prompt that is cached has no slices
        return preemptions(prefill) > before

    until_seen(once, "a batch preempts")


ROUTED = next(s for s in PLAIN if s.shape == "qwen3moe")


@on(ROUTED)[0]
@on(ROUTED)[1]
def test_experts_that_are_returned_are_those_of_each_token(prefill: Prefill, reference: Reference) -> None:
    torch, prompts = reference.torch, crowd(random.Random(11))

    def of_transformers(prompt: list[int]) -> Any:
        with torch.inference_mode():
            logits = reference.model(torch.tensor([prompt]), output_router_logits=True).router_logits
        return torch.stack([layer.topk(2, -1).indices.sort(-1).values for layer in logits], 1)

    def once(_: int) -> bool:
        before = preemptions(prefill)
        answered = asyncio.run(answers(prefill, prompts, return_routed_experts=[True] * len(prompts)))
        for prompt, answer in zip(prompts, answered, strict=True):
            found = base64.b64decode(answer["meta_info"]["routed_experts"])
            experts = torch.frombuffer(bytearray(found), dtype=torch.int32).view(len(prompt), -1, 2)
            same = (experts.sort(-1).values == of_transformers(prompt)).all(-1)
            # Two experts may be as good as each other but for rounding.
            assert float((~same).float().mean()) < 2e-3, f"prompt of {len(prompt)} tokens"
        prefill.all_tokens_are_free()
        return preemptions(prefill) > before

    until_seen(once, "a batch preempts")


@on(*ADAPTERS)[0]
@on(*ADAPTERS)[1]
def test_two_adapters_among_paused_and_preempting(prefill: Prefill, reference: Reference) -> None:
    models = with_adapters(reference)
    prompts = crowd(random.Random(6))
    chosen = [[*models][i % 3] for i in range(len(prompts))]
    each = {tuple(model.first(p)[0] for p in prompts[5:10]) for model in models.values()}
    assert len(each) == len(models), "an adapter that is left out would not be found out"

    def once(_: int) -> bool:
        got = asyncio.run(answers(prefill, prompts, lora_path=chosen))
        for prompt, name, answer in zip(prompts, chosen, got, strict=True):
            must_be(models[name].first(prompt), answer, prompt)
        prefill.all_tokens_are_free()
        return preemptions(prefill) > 0

    until_seen(once, "a batch preempts")


def table() -> dict[str, str]:
    """Return the table of models in docs/LAPS.md: class name -> where its passes are paused."""
    rows = re.findall(r"^\| (layer,[^|`]*) \| (`[^|]+) \|", DOCS.read_text(), re.MULTILINE)
    named = [(f"{name}ForCausalLM", where) for where, names in rows for name in re.findall(r"`(\w+)`", names)]
    assert len(dict(named)) == len(named), "an architecture is listed twice"
    return dict(named)


WHERE = {4: "layer, attention, projection, MLP", 3: "layer, attention, projection", 2: "layer, MLP"}


@on(*PLAIN)[0]
@on(*PLAIN)[1]
def test_the_manual_says_where_each_architecture_is_paused(prefill: Prefill) -> None:
    assert isinstance(prefill.setup.shape, str)
    name = f"{architectures.ALL[prefill.setup.shape].family}ForCausalLM"
    assert WHERE[prefill.get("/laps_status")["slices"]["operators"]] == table()[name]


def test_the_manual_names_each_architecture_that_is_tested() -> None:
    tested = {f"{architectures.ALL[n].family}ForCausalLM" for n in NAMES}
    assert tested <= set(table())
    more = re.search(r"^Answers under load.*", DOCS.read_text(), re.MULTILINE)
    assert more is not None
    assert re.findall(r"`(\w+)`", more[0]) == [a.family for a in more_models.ALL.values()]
