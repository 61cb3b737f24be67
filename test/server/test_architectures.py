"""Stock SGLang on the host platform computes as Hugging Face transformers does: chunks, batches, prefixes from the
cache, draft models, and data-parallel attention. ``test_slices_models`` compares every architecture, with LAPS."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import adapters
import http_load as load
import pytest
from served import CHUNK, Prefill, Reference, Setup, make_checkpoint, random_prompt, request_body, run_on

from .slicing import WITH_PREFIX_CACHE

TOLERANCE = 1e-3
"""Tolerance of a log-probability between two float32 computations."""
ONE_STEP = (
    *("--speculative-num-steps", "1", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "2"),
    "--speculative-algorithm",
)
CHAIN = ("--speculative-num-steps", "3", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4")
DP_ATTENTION = ("--tp-size", "2", "--dp-size", "2", "--enable-dp-attention")
TWO_CORES = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}


def stock(architecture: str, *args: str, name: str = "", **more: Any) -> Setup:
    """Return the setup of a prefill server without LAPS that caches prefixes."""
    return Setup(
        f"stock-{architecture}{name}", args, {**WITH_PREFIX_CACHE, **more.pop("env", {})}, architecture, **more
    )


def lora_folders(base: Path) -> list[Path]:
    return [adapters.make_lora(base.parent, base, seed) for seed in (1, 2)]


def lora_args(base: Path) -> list[str]:
    return ["--lora-paths", *(f"adapter{i}={folder}" for i, folder in enumerate(lora_folders(base)))]


def eagle_args(base: Path) -> list[str]:
    return ["--speculative-draft-model-path", str(adapters.make_draft(base.parent, base.name.partition("-")[0]))]


def layers_args(base: Path) -> list[str]:
    """Return arguments for a draft with its own layer for each further token."""
    made = adapters.make_mimo_mtp_layers(base.parent, base)
    return ["--speculative-algorithm", "EAGLE", "--speculative-draft-model-path", str(made)]


DRAFTS = (stock("glm4moe", *ONE_STEP, "NEXTN", name="-nextn"),)
TOGETHER = (stock("qwen3moe", *DP_ATTENTION, name="-dp", env=TWO_CORES),)
"""Setup that runs only here; ``test_slices_models`` runs the others with LAPS."""
pytestmark = run_on(*DRAFTS, *TOGETHER)


async def first_tokens(prefill: Prefill, prompts: list[list[int]]) -> list[dict[str, Any]]:
    """Send all prompts at once and return the answers. Bootstrap rooms alternate between DP ranks."""

    async def one(http: Any, i: int) -> dict[str, Any]:
        body = request_body(1000 + i, prompts[i]) | {"return_logprob": True}
        async with http.post(prefill.server.url + "/generate", json=body) as reply:
            answer: dict[str, Any] = await reply.json()
            assert reply.status == 200, answer
            return answer

    async with load.session() as http:
        return list(await asyncio.gather(*(one(http, i) for i in range(len(prompts)))))


def require_answer(want: tuple[int, float], answer: dict[str, Any], prompt: list[int]) -> None:
    """Require this token, with this probability."""
    logprob, token = answer["meta_info"]["output_token_logprobs"][0][:2]
    assert (token, logprob) == (want[0], pytest.approx(want[1], abs=TOLERANCE)), f"prompt of {len(prompt)} tokens"


def with_adapters(reference: Reference) -> dict[str | None, Reference]:
    """Return references by adapter name: without an adapter (None), and with each of the two adapters merged."""
    models: dict[str | None, Reference] = {None: reference}
    for i, folder in enumerate(lora_folders(make_checkpoint("qwen2"))):
        models[f"adapter{i}"] = merged = reference.copy_as(f"adapter{i}")
        adapters.merge_adapter(merged.model, folder)
    return models


def test_first_tokens_equal_transformers(prefill: Prefill, reference: Reference) -> None:
    document = random_prompt(77, CHUNK + 200)
    prompts = [document, *(random_prompt(i, n) for i, n in enumerate((5, 60, 129, 300, CHUNK + 1, 2100)))]
    later = [
        [*document, *random_prompt(90 + i, n)] for i, n in enumerate((5, CHUNK + 40))
    ] * 2  # each rank holds the document
    answers = asyncio.run(first_tokens(prefill, [*prompts, document]))
    answers = answers[: len(prompts)] + asyncio.run(first_tokens(prefill, later))
    want = {tuple(p): reference.next_token(p) for p in (*prompts, *later)}
    for prompt, answer in zip((*prompts, *later), answers, strict=True):
        require_answer(want[tuple(prompt)], answer, prompt)
    assert sum(answer["meta_info"]["cached_tokens"] >= len(document) - 1 for answer in answers) >= 2
    assert len({token for token, _ in want.values()}) >= len(want) - 2, "a server that is wrong would not be found out"
