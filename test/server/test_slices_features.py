"""Slices together with other features of a server: HiCache, grammars, priorities."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import http_load as load
import pytest
from rounds import repeat_until
from served import LAPS, NORMAL_LOOP, Prefill, Reference, Setup, random_prompt, run_on

from .slicing import (
    PAUSE_AFTER_EACH_LAYER,
    WITH_PREFIX_CACHE,
    arrived_during,
    count_preemptions,
    post,
    request_body,
    slicing_setup,
    wait_until_slices_run,
)

HICACHE = (
    "--enable-hierarchical-cache", "--hicache-ratio", "4", "--hicache-io-backend", "direct",
    "--hicache-mem-layout", "layer_first", "--hicache-write-policy", "write_through",
)  # fmt: skip
POOL, SLOTS = 16384, 60
MORE = (*HICACHE, "--enable-priority-scheduling", "--grammar-backend", "xgrammar", "--max-total-tokens", str(POOL))
SETUPS = (slicing_setup("features-normal", *MORE, *NORMAL_LOOP), slicing_setup("features-overlap", *MORE))
PAGES = ("--hicache-mem-layout", "page_first_direct", "--max-mamba-cache-size", str(SLOTS))
ROOM = ("--max-total-tokens", str(POOL), "--chunked-prefill-size", "4096")
STATES = Setup(
    "features-states", (*LAPS, *PAUSE_AFTER_EACH_LAYER, *HICACHE, *PAGES, *ROOM), WITH_PREFIX_CACHE, "qwen3next"
)
"""Server of a model with linear attention: its states return from the host with the KV of its other layers."""
pytestmark = pytest.mark.usefixtures("clean")


@run_on(*SETUPS, STATES)[0]
def test_prefixes_loaded_from_host_are_correct_under_preemption(prefill: Prefill, reference: Reference) -> None:
    before = count_preemptions(prefill)

    def attempt(i: int) -> bool:
        rng, seed = random.Random(5), 1000 * i
        documents = [random_prompt(seed + 20 + i, 1500) for i in range(8)]
        longs = [document + random_prompt(seed + 40 + i, 700 + 300 * i) for i, document in enumerate(documents[:4])]
        shorts = [documents[4 + i % 4] + random_prompt(seed + 60 + i, rng.randint(5, 90)) for i in range(12)]
        plain = [random_prompt(seed + 80 + i, rng.randint(5, 90)) for i in range(24)]

        async def scenario() -> list[Any]:
            async with load.session() as http:
                for prompt in documents:
                    assert (await post(http, prefill, request_body(prompt)))[0] == 200
                await evict_from_device(http, prefill, seed + 90)
                sent = [post(http, prefill, request_body(p), 0.3 * i) for i, p in enumerate(longs)]
                sent += [post(http, prefill, request_body(p), rng.random() * 2.0) for p in shorts + plain]
                return list(await asyncio.gather(*sent))

        answers = asyncio.run(scenario())
        assert all(status == 200 for status, _, _ in answers), answers
        cached = [answer["meta_info"]["cached_tokens_details"] or {"host": 0} for _, answer, _ in answers]
        assert sum(details["host"] >= 1400 for details in cached) >= 4, cached
        for (_, answer, _), prompt in zip(answers, [*longs, *shorts, *plain], strict=True):
            assert answer["output_ids"] == reference.greedy(prompt, 1), f"{len(prompt)} tokens"
        return count_preemptions(prefill) > before

    repeat_until(attempt, "a batch preempts")
    prefill.require_all_tokens_free()


async def evict_from_device(http: Any, prefill: Prefill, seed: int, *, states: bool = False) -> None:
    """Send more tokens than the device holds, so that earlier prefixes remain on the host only. ``states``: send more
    prompts than it has states for, so that only states leave."""
    count, tokens = (SLOTS, 65) if states else (POOL // 3000 + 1, 3000)
    for i in range(count):
        assert (await post(http, prefill, request_body(random_prompt(seed + i, tokens))))[0] == 200


@run_on(*SETUPS, STATES)[0]
def test_short_requests_share_prefix_loading_for_paused_batch(prefill: Prefill, reference: Reference) -> None:
    share_reloaded_prefix(prefill, reference)


@run_on(STATES)[0]
def test_short_requests_share_states_loading_for_paused_batch(prefill: Prefill, reference: Reference) -> None:
    """The device still has the KV of the other layers."""
    share_reloaded_prefix(prefill, reference, states=True)


def share_reloaded_prefix(prefill: Prefill, reference: Reference, *, states: bool = False) -> None:
    """Send short requests with the prefix that is being loaded for the paused batch. ``states``: of the prefix, only
    states have left the device."""
    before = count_preemptions(prefill)

    def attempt(i: int) -> bool:
        seed = 120 + 1000 * i
        document = random_prompt(seed, 1500)
        long, shorts = (
            document + random_prompt(seed + 1, 2500),
            [document + random_prompt(seed + 2 + i, 20) for i in range(4)],
        )

        async def scenario() -> list[Any]:
            async with load.session() as http:
                assert (await post(http, prefill, request_body(document)))[0] == 200
                await evict_from_device(http, prefill, seed + 10, states=states)
                running = asyncio.ensure_future(post(http, prefill, request_body(long)))
                await wait_until_slices_run(http, prefill, running)
                return [*[await post(http, prefill, request_body(prompt)) for prompt in shorts], await running]

        answers = asyncio.run(scenario())
        for (status, answer, _), prompt in zip(answers, [*shorts, long], strict=True):
            assert status == 200, answer
            assert answer["output_ids"] == reference.greedy(prompt, 1), f"{len(prompt)} tokens"
        cached = answers[-1][1]["meta_info"]["cached_tokens_details"] or {"host": 0}
        # If only states have left the device, the KV does not come from the host.
        loaded = states or cached["host"] >= 1400
        return loaded and count_preemptions(prefill) > before

    repeat_until(attempt, "the prefix is loaded and a batch preempts")


@run_on(*SETUPS)[0]
def test_grammars_apply_to_paused_and_preempting_requests(prefill: Prefill) -> None:
    """Each grammar masks its own request's token, whatever batch ran in between."""
    wanted = {"[0-9]{4}": str.isdigit, "[a-z]{4}": str.islower, "[A-Z]{4}": str.isupper}
    sizes = [4000, 3000, *([40] * 24), 3500]
    before = count_preemptions(prefill)

    async def scenario(seed: int) -> list[tuple[str, str]]:
        async with load.session() as http:
            regexes = [list(wanted)[i % len(wanted)] for i in range(len(sizes))]
            bodies = [
                request_body(random_prompt(seed + i, n), regex=regex)
                for i, (n, regex) in enumerate(zip(sizes, regexes, strict=True))
            ]
            answers = await asyncio.gather(*(post(http, prefill, body, 0.05 * i) for i, body in enumerate(bodies)))
            assert all(status == 200 for status, _, _ in answers), answers
            return [(regex, answer["text"]) for regex, (_, answer, _) in zip(regexes, answers, strict=True)]

    def attempt(i: int) -> bool:
        for regex, text in asyncio.run(scenario(200 + 1000 * i)):
            assert wanted[regex](text), (regex, text)
        return count_preemptions(prefill) > before

    repeat_until(attempt, "a batch preempts")


@run_on(*SETUPS)[0]
def test_only_equal_or_higher_priority_preempts(prefill: Prefill, reference: Reference) -> None:
    def first_of(long: int, short: int, seed: int) -> str:
        """Return which request was answered first: a running long prompt or a short prompt that arrived meanwhile.
        Empty if the short prompt arrived before or after."""
        prompt, other, before = random_prompt(seed, 4500), random_prompt(seed + 1, 40), count_preemptions(prefill)

        async def scenario() -> tuple[Any, Any]:
            async with load.session() as http:
                running = asyncio.ensure_future(post(http, prefill, {**request_body(prompt), "priority": long}))
                await wait_until_slices_run(http, prefill, running)
                return await post(http, prefill, {**request_body(other), "priority": short}), await running

        answer, whole = asyncio.run(scenario())
        assert (answer[0], whole[0]) == (200, 200), (answer, whole)
        assert answer[1]["output_ids"] == reference.greedy(other, 1)
        assert whole[1]["output_ids"] == reference.greedy(prompt, 1)
        assert short >= long or count_preemptions(prefill) == before
        if not arrived_during(answer[1], whole[1]):
            return ""
        return "long" if whole[2] <= answer[2] else "short"

    def waits(i: int) -> bool:
        found = first_of(5, 1, 300 + 1000 * i)
        assert found != "short"
        return found == "long"

    repeat_until(waits, "a short request of lower priority waits")
    repeat_until(lambda i: first_of(5, 5, 310 + 1000 * i) == "short", "one of the same preempts")
    repeat_until(lambda i: first_of(1, 5, 320 + 1000 * i) == "short", "one of higher priority preempts")
