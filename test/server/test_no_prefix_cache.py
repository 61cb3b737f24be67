"""A server without a prefix cache, on which SGLang admits requests with ``ignore_eos`` in another way."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import http_load as load
import pytest
from hostile import FATAL
from served import CHUNK, NO_PREFIX_CACHE, Prefill, make_checkpoint, random_prompt, request_body, run_on

pytestmark = run_on(NO_PREFIX_CACHE)


def test_short_requests_with_ignore_eos_are_never_chunked(prefill: Prefill) -> None:
    rng = random.Random(3)

    async def one(http: Any, prompt: list[int]) -> None:
        body = request_body(rng.getrandbits(60), prompt)
        body["sampling_params"]["ignore_eos"] = True
        async with http.post(prefill.server.url + "/generate", json=body) as reply:
            answer = await reply.json()
            assert reply.status == 200, answer
            assert answer["meta_info"]["finish_reason"]["type"] == "length"

    async def scenario() -> None:
        async with load.session() as http:
            longs = [one(http, random_prompt(i, 8 * CHUNK)) for i in range(3)]
            # More tokens in one batch than in a chunk, and no number of these prompts fills a chunk exactly.
            shorts = [one(http, random_prompt(100 + i, 201)) for i in range(60)]
            await asyncio.wait_for(asyncio.gather(*longs, *shorts), 390)

    before = prefill.totals()["short"]
    asyncio.run(scenario())
    after = prefill.totals()["short"]
    assert after["requests"] - before["requests"] == 60
    assert after["tokens"] - before["tokens"] == 60 * 201
    prefill.require_all_tokens_free()


@pytest.mark.parametrize(
    "prompt",
    [{"text": ""}, {"text": ["a", ""]}, {"input_ids": []}, {"input_ids": [[1, 2], []]}],
    ids=["text", "texts", "ids", "lists of ids"],
)
def test_empty_prompt_is_refused_and_server_keeps_serving(prefill: Prefill, prompt: dict[str, Any]) -> None:
    status, answer = prefill.post(
        "/generate", {**request_body(1, [5]), "input_ids": None, **prompt, "bootstrap_room": None}
    )
    assert status == 400, answer
    assert prefill.post("/generate", request_body(77, [5, 6, 7]))[0] == 200


@pytest.mark.parametrize(("fields", "sampling"), FATAL.values(), ids=FATAL)
def test_fatal_values_are_refused_and_server_keeps_serving(
    prefill: Prefill, fields: dict[str, Any], sampling: dict[str, Any]
) -> None:
    body = {**request_body(1, [5, 6]), "bootstrap_room": None, **fields}
    status, answer = prefill.post("/generate", {**body, "sampling_params": {**body["sampling_params"], **sampling}})
    assert status == 400, answer
    assert prefill.post("/generate", request_body(80, [5, 6, 7]))[0] == 200


@pytest.mark.parametrize(
    ("route", "body", "told"),
    [
        ("/update_weights_from_disk", {"model_path": "", "load_format": "unknown"}, "unknown"),
        ("/begin_weight_update", {"selector": "unknown"}, "unknown"),
        (
            "/init_weights_update_group",
            {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2, "group_name": ""},
            "name cannot be empty",
        ),
    ],
)
def test_messages_of_new_weights_that_sglang_cannot_read_are_refused(
    prefill: Prefill, route: str, body: dict[str, Any], told: str
) -> None:
    status, answer = prefill.post(route, body)
    assert (status, told in answer) == (400, True), answer
    assert prefill.post("/generate", request_body(82, [5, 6, 7]))[0] == 200


def test_unusual_values_that_harm_nobody_are_served(prefill: Prefill) -> None:
    for sampling in ({"top_k": 2**31 - 1}, {"stop_token_ids": [10**9]}, {"stop_token_ids": [3], "min_new_tokens": 1}):
        body = request_body(81, [5, 6, 7])
        body |= {"return_logprob": True, "top_logprobs_num": 20, "logprob_start_len": -1}
        status, answer = prefill.post("/generate", {**body, "sampling_params": {**body["sampling_params"], **sampling}})
        assert status == 200, answer


def test_prompts_given_as_embeddings_and_as_ids_are_served_at_once(prefill: Prefill) -> None:
    """SGLang runs a batch on embeddings if one of its requests has any; ids in this batch would end the server."""
    width = json.loads((make_checkpoint(prefill.setup.shape) / "config.json").read_text())["hidden_size"]

    async def one(http: Any, i: int) -> None:
        body = request_body(9000 + i, random_prompt(i, 20 + i))
        if i % 3 == 0:
            body |= {"input_ids": None, "input_embeds": [[0.01 * i] * width] * (20 + i)}
        async with http.post(prefill.server.url + "/generate", json=body) as reply:
            assert reply.status == 200, await reply.text()

    async def scenario() -> None:
        async with load.session() as http:
            await asyncio.gather(*(one(http, i) for i in range(24)))

    asyncio.run(scenario())
    prefill.require_all_tokens_free()


def test_logit_processor_of_request_is_applied(prefill: Prefill) -> None:
    from sglang.srt.sampling.custom_logit_processor import DisallowedTokensLogitsProcessor

    def first_token(**more: Any) -> int:
        status, answer = prefill.post("/generate", {**request_body(82, [5, 6, 7]), **more})
        assert status == 200, answer
        return int(json.loads(answer)["output_ids"][0])

    usual = first_token()
    sampling = {"max_new_tokens": 1, "temperature": 0, "custom_params": {"token_ids": [usual]}}
    processor = DisallowedTokensLogitsProcessor.to_str()
    assert first_token(custom_logit_processor=processor, sampling_params=sampling) != usual


def test_request_for_several_samples_is_refused(prefill: Prefill) -> None:
    body = request_body(78, [5, 6, 7])
    status, answer = prefill.post("/generate", {**body, "sampling_params": {**body["sampling_params"], "n": 2}})
    assert status == 400, answer
    assert "one sample" in str(answer)
    assert prefill.post("/generate", request_body(79, [5, 6, 7]))[0] == 200


def test_series_have_the_extra_labels_of_sglang(prefill: Prefill) -> None:
    series = [line for line in prefill.get("/metrics").splitlines() if line.startswith("sglang:laps_")]
    assert series
    assert all('zone="z1"' in line for line in series), series[0]
