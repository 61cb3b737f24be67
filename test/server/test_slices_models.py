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
from rounds import repeat_until
from served import NORMAL_LOOP, Prefill, Reference, Setup, random_prompt, run_on
from sglang_laps import compat

from .slicing import (
    LAPS,
    PAUSE_AFTER_EACH_LAYER,
    WITH_PREFIX_CACHE,
    count_preemptions,
    post,
    request_body,
    wait_until_slices_run,
)
from .test_architectures import (
    CHAIN,
    DP_ATTENTION,
    ONE_STEP,
    TWO_CORES,
    eagle_args,
    layers_args,
    lora_args,
    require_answer,
    with_adapters,
)

DOCS = Path(__file__).parents[2] / "docs" / "LAPS.md"
TP2 = ("--tp-size", "2")
WINDOWED = ("gemma2", "gptoss", "mimov2")
"""Architectures with sliding-window attention; their long prompts run in several chunks, too."""
NAMES = architectures.NAMES
FLAGS = {"qwen3moe": ("--enable-return-routed-experts",)}
"""Further flags of an architecture's server."""


def make_setup(
    architecture: str, *args: str, name: str = "", env: dict[str, str] | None = None, **extra_args: Any
) -> Setup:
    """Return the setup of a server that pauses as often as possible."""
    chunk = "1024" if architecture in WINDOWED else "4096"
    every = (*LAPS, *PAUSE_AFTER_EACH_LAYER, "--chunked-prefill-size", chunk, *args)
    return Setup(
        f"slices-{architecture}{name}", every, {**WITH_PREFIX_CACHE, **(env or {})}, architecture, **extra_args
    )


LOOPS = (
    lambda n: make_setup(n, *FLAGS.get(n, ())),
    lambda n: make_setup(n, *FLAGS.get(n, ()), *NORMAL_LOOP, name="-normal"),
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
COUNTED = make_setup(
    "qwen3moe",
    *(*TP2, *EXCHANGE, "--expert-distribution-recorder-mode", "stat"),
    *("--expert-distribution-recorder-buffer-size", "1000"),
    name="-tp2-experts",
    env=TWO_CORES,
)
RANKS = (
    *(make_setup(n, *TP2, name="-tp2", env=TWO_CORES) for n in ("deepseek3", "gptoss")),
    *([COUNTED] if EXCHANGES else []),
)
DRAFTS = (
    make_setup("qwen2", *ONE_STEP, "EAGLE", name="-eagle", extra_args=eagle_args),
    make_setup("deepseek3", *ONE_STEP, "NEXTN", *NORMAL_LOOP, name="-nextn"),
    make_setup("mimov2", *CHAIN, name="-eagle", extra_args=layers_args),
)
ADAPTERS = (make_setup("qwen2", "--max-loras-per-batch", "3", name="-lora", extra_args=lora_args),)
TOGETHER = (
    make_setup("deepseek3", *DP_ATTENTION, name="-dp", env=TWO_CORES),
    make_setup("deepseek3", *DP_ATTENTION, *EXPERTS, *ONE_STEP, "NEXTN", name="-dp-nextn", env=TWO_CORES),
)


def mixed_prompts(rng: random.Random) -> list[list[int]]:
    """Return a document, long prompts, and short prompts to send while these run; some start with the document."""
    document = random_prompt(77, 700)
    longs = [random_prompt(10 + i, n) for i, n in enumerate((1600, 1100, 2200))] + [
        [*document, *random_prompt(14, 600)]
    ]
    shorts = [random_prompt(100 + i, rng.randint(5, 200)) for i in range(14)]
    return [document, *longs, *shorts, *([*document, *random_prompt(130 + i, 9)] for i in range(2))]


async def send_while_long_runs(prefill: Prefill, prompts: list[list[int]], **fields: list[Any]) -> list[dict[str, Any]]:
    """Send the first prompt alone, then the long ones, then the short ones once a long batch runs; return answers."""
    rng, short_s = random.Random(3), 0.0

    async def one(http: Any, i: int) -> dict[str, Any]:
        body = {**request_body(prompts[i]), "return_logprob": True, **{k: v[i] for k, v in fields.items()}}
        status, answer, _ = await post(http, prefill, body, short_s * rng.random())
        assert status == 200, answer
        return dict(answer)

    async with load.session() as http:
        first = await one(http, 0)
        everybody = range(1, len(prompts))
        sent = {i: asyncio.ensure_future(one(http, i)) for i in everybody if len(prompts[i]) > 800}
        await wait_until_slices_run(http, prefill, asyncio.gather(*sent.values()))
        short_s = 0.3
        sent |= {i: asyncio.ensure_future(one(http, i)) for i in everybody if i not in sent}
        return [first, *[await sent[i] for i in everybody]]


async def measure_steps_of_many_sizes(prefill: Prefill) -> bool:
    """Send pairs of prompts, one for each DP rank, until both ranks know their step times; False if they never do."""
    async with load.session() as http:
        for i in range(200):
            sizes = (20 + 37 * i % 230, 20 + 91 * i % 230)
            both = [request_body(random_prompt(50_000 + 2 * i + r, n)) for r, n in enumerate(sizes)]
            sent = (post(http, prefill, {**b, "routed_dp_rank": r}, 0.0) for r, b in enumerate(both))
            assert [status for status, *_ in await asyncio.gather(*sent)] == [200, 200]
            if i % 10 == 9 and all(r["group"]["fitted"] for r in prefill.get("/laps_status")["ranks"]):
                return True
    return False


@run_on(*PLAIN, *OTHER, *RANKS, *DRAFTS)[0]
@run_on(*PLAIN)[1]
def test_first_tokens_equal_transformers(prefill: Prefill, reference: Reference) -> None:
    prompts = mixed_prompts(random.Random(5))

    def attempt(_: int) -> bool:
        got = asyncio.run(send_while_long_runs(prefill, prompts))
        for prompt, answer in zip(prompts, got, strict=True):
            require_answer(reference.next_token(prompt), answer, prompt)
        prefill.require_all_tokens_free()  # a prompt that is cached has no slices
        return count_preemptions(prefill) > 0

    repeat_until(attempt, "a batch preempts")


@run_on(*TOGETHER)[0]
@run_on(*TOGETHER)[1]
def test_dp_ranks_share_plan_and_preempt_together(prefill: Prefill, reference: Reference) -> None:
    known = asyncio.run(measure_steps_of_many_sizes(prefill))
    assert known, "times of steps are not learnt"
    prompts = mixed_prompts(random.Random(5))
    ranks = [i % 2 for i in range(len(prompts))]
    for _ in range(8):  # until a step has preempted another
        got = asyncio.run(send_while_long_runs(prefill, prompts, routed_dp_rank=ranks))
        for prompt, answer in zip(prompts, got, strict=True):
            require_answer(reference.next_token(prompt), answer, prompt)
        prefill.require_all_tokens_free()
        said = [r["group"] for r in prefill.get("/laps_status")["ranks"]]
        if said[0]["preemptions"]:
            break
    assert said[0]["preemptions"] == said[1]["preemptions"] > 0, said
    assert said[0]["steps"] == said[1]["steps"] > 0, "a rank's step is the other's"
    assert prefill.server.alive()


@pytest.mark.skipif(not EXCHANGES, reason="no exchange between experts on this release")
@run_on(COUNTED)[0]
@run_on(COUNTED)[1]
def test_expert_choices_are_counted_for_all_tokens(prefill: Prefill, reference: Reference) -> None:
    prompts = mixed_prompts(random.Random(7))

    def post_record_command(what: str) -> None:
        prefill.post(f"/{what}_expert_distribution_record", {})

    def attempt(_: int) -> bool:
        before = count_preemptions(prefill)
        post_record_command("start")
        answered = asyncio.run(send_while_long_runs(prefill, prompts))
        post_record_command("stop")
        post_record_command("dump")
        paths = re.findall(r"Write expert distribution to (\S+)", prefill.server.log.read_text())
        counts = reference.torch.load(paths[-1])["logical_count"].sum(0).sum(-1)
        Path(paths[-1]).unlink()
        tokens = sum(len(p) - a["meta_info"]["cached_tokens"] for p, a in zip(prompts, answered, strict=True))
        assert (counts == 2 * tokens).all(), f"{counts} of {tokens} tokens with two experts each"
        prefill.require_all_tokens_free()  # a prompt that is cached has no slices
        return count_preemptions(prefill) > before

    repeat_until(attempt, "a batch preempts")


ROUTED = next(s for s in PLAIN if s.shape == "qwen3moe")


@run_on(ROUTED)[0]
@run_on(ROUTED)[1]
def test_returned_experts_equal_transformers(prefill: Prefill, reference: Reference) -> None:
    torch, prompts = reference.torch, mixed_prompts(random.Random(11))

    def transformers_experts(prompt: list[int]) -> Any:
        with torch.inference_mode():
            logits = reference.model(torch.tensor([prompt]), output_router_logits=True).router_logits
        return torch.stack([layer.topk(2, -1).indices.sort(-1).values for layer in logits], 1)

    def attempt(_: int) -> bool:
        before = count_preemptions(prefill)
        answered = asyncio.run(send_while_long_runs(prefill, prompts, return_routed_experts=[True] * len(prompts)))
        for prompt, answer in zip(prompts, answered, strict=True):
            found = base64.b64decode(answer["meta_info"]["routed_experts"])
            experts = torch.frombuffer(bytearray(found), dtype=torch.int32).view(len(prompt), -1, 2)
            same = (experts.sort(-1).values == transformers_experts(prompt)).all(-1)
            # Two experts may be as good as each other but for rounding.
            assert float((~same).float().mean()) < 2e-3, f"prompt of {len(prompt)} tokens"
        prefill.require_all_tokens_free()
        return count_preemptions(prefill) > before

    repeat_until(attempt, "a batch preempts")


@run_on(*ADAPTERS)[0]
@run_on(*ADAPTERS)[1]
def test_lora_adapters_are_correct_under_preemption(prefill: Prefill, reference: Reference) -> None:
    models = with_adapters(reference)
    prompts = mixed_prompts(random.Random(6))
    chosen = [[*models][i % 3] for i in range(len(prompts))]
    each = {tuple(model.next_token(p)[0] for p in prompts[5:10]) for model in models.values()}
    assert len(each) == len(models), "an adapter that is left out would not be found out"

    def attempt(_: int) -> bool:
        got = asyncio.run(send_while_long_runs(prefill, prompts, lora_path=chosen))
        for prompt, name, answer in zip(prompts, chosen, got, strict=True):
            require_answer(models[name].next_token(prompt), answer, prompt)
        prefill.require_all_tokens_free()
        return count_preemptions(prefill) > 0

    repeat_until(attempt, "a batch preempts")


def make_table() -> dict[str, str]:
    """Return the table of models in docs/LAPS.md: class name -> where its passes are paused."""
    rows = re.findall(r"^\| (layer,[^|`]*) \| (`[^|]+) \|", DOCS.read_text(), re.MULTILINE)
    named = [(f"{name}ForCausalLM", where) for where, names in rows for name in re.findall(r"`(\w+)`", names)]
    assert len(dict(named)) == len(named), "an architecture is listed twice"
    return dict(named)


WHERE = {4: "layer, attention, projection, MLP", 3: "layer, attention, projection", 2: "layer, MLP"}


@run_on(*PLAIN)[0]
@run_on(*PLAIN)[1]
def test_manual_lists_pause_points_of_each_architecture(prefill: Prefill) -> None:
    assert isinstance(prefill.setup.shape, str)
    name = f"{architectures.ALL[prefill.setup.shape].family}ForCausalLM"
    assert WHERE[prefill.get("/laps_status")["slices"]["operators"]] == make_table()[name]


def test_manual_names_each_tested_architecture() -> None:
    tested = {f"{architectures.ALL[n].family}ForCausalLM" for n in NAMES}
    assert tested <= set(make_table())
    more = re.search(r"^Answers under load.*", DOCS.read_text(), re.MULTILINE)
    assert more is not None
    assert re.findall(r"`(\w+)`", more[0]) == [a.family for a in more_models.ALL.values()]
