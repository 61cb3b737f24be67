"""Slices together with other features of a server: HiCache, grammars, priorities."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import http_load as load
import pytest
from rounds import until_seen
from served import LAPS, NORMAL_LOOP, Prefill, Reference, Setup, ids, on

from .slicing import CACHED, EVERY_LAYER, ask, came_amid, post, preemptions, setup, until_slices_run

HICACHE = (
    "--enable-hierarchical-cache", "--hicache-ratio", "4", "--hicache-io-backend", "direct",
    "--hicache-mem-layout", "layer_first", "--hicache-write-policy", "write_through",
)  # fmt: skip
POOL, SLOTS = 16384, 60
MORE = (*HICACHE, "--enable-priority-scheduling", "--grammar-backend", "xgrammar", "--max-total-tokens", str(POOL))
SETUPS = (setup("features-normal", *MORE, *NORMAL_LOOP), setup("features-overlap", *MORE))
PAGES = ("--hicache-mem-layout", "page_first_direct", "--max-mamba-cache-size", str(SLOTS))
ROOM = ("--max-total-tokens", str(POOL), "--chunked-prefill-size", "4096")
STATES = Setup("features-states", (*LAPS, *EVERY_LAYER, *HICACHE, *PAGES, *ROOM), CACHED, "qwen3next")
"""Server of a model with linear attention: its states return from the host with the KV of its other layers."""
pytestmark = pytest.mark.usefixtures("clean")


@on(*SETUPS, STATES)[0]
def test_prefixes_that_come_back_from_the_host_while_batches_preempt(prefill: Prefill, reference: Reference) -> None:
    before = preemptions(prefill)

    def once(i: int) -> bool:
        rng, seed = random.Random(5), 1000 * i
        documents = [ids(seed + 20 + i, 1500) for i in range(8)]
        longs = [document + ids(seed + 40 + i, 700 + 300 * i) for i, document in enumerate(documents[:4])]
        shorts = [documents[4 + i % 4] + ids(seed + 60 + i, rng.randint(5, 90)) for i in range(12)]
        plain = [ids(seed + 80 + i, rng.randint(5, 90)) for i in range(24)]

        async def scenario() -> list[Any]:
            async with load.session() as http:
                for prompt in documents:
                    assert (await post(http, prefill, ask(prompt)))[0] == 200
                await leave_the_device(http, prefill, seed + 90)
                sent = [post(http, prefill, ask(p), 0.3 * i) for i, p in enumerate(longs)]
                sent += [post(http, prefill, ask(p), rng.random() * 2.0) for p in shorts + plain]
                return list(await asyncio.gather(*sent))

        answers = asyncio.run(scenario())
        assert all(status == 200 for status, _, _ in answers), answers
        cached = [answer["meta_info"]["cached_tokens_details"] or {"host": 0} for _, answer, _ in answers]
        assert sum(details["host"] >= 1400 for details in cached) >= 4, cached
        for (_, answer, _), prompt in zip(answers, [*longs, *shorts, *plain], strict=True):
            assert answer["output_ids"] == reference.greedy(prompt, 1), f"{len(prompt)} tokens"
        return preemptions(prefill) > before

    until_seen(once, "a batch preempts")
    prefill.all_tokens_are_free()


async def leave_the_device(http: Any, prefill: Prefill, seed: int, *, states: bool = False) -> None:
    """Send more tokens than the device holds, so that earlier prefixes remain on the host only. ``states``: send more
    prompts than it has states for, so that only states leave."""
    count, tokens = (SLOTS, 65) if states else (POOL // 3000 + 1, 3000)
    for i in range(count):
        assert (await post(http, prefill, ask(ids(seed + i, tokens))))[0] == 200


@on(*SETUPS, STATES)[0]
def test_a_prefix_that_comes_back_for_the_paused_batch_is_waited_for(prefill: Prefill, reference: Reference) -> None:
    share_a_prefix_that_comes_back(prefill, reference)


@on(STATES)[0]
def test_states_that_come_back_for_the_paused_batch_are_waited_for(prefill: Prefill, reference: Reference) -> None:
    """The device still has the KV of the other layers."""
    share_a_prefix_that_comes_back(prefill, reference, states=True)


def share_a_prefix_that_comes_back(prefill: Prefill, reference: Reference, *, states: bool = False) -> None:
    """Send short requests with the prefix that is being loaded for the paused batch. ``states``: of the prefix, only
    states have left the device."""
    before = preemptions(prefill)

    def once(i: int) -> bool:
        seed = 120 + 1000 * i
        document = ids(seed, 1500)
        long, shorts = document + ids(seed + 1, 2500), [document + ids(seed + 2 + i, 20) for i in range(4)]

        async def scenario() -> list[Any]:
            async with load.session() as http:
                assert (await post(http, prefill, ask(document)))[0] == 200
                await leave_the_device(http, prefill, seed + 10, states=states)
                running = asyncio.ensure_future(post(http, prefill, ask(long)))
                await until_slices_run(http, prefill, running)
                return [*[await post(http, prefill, ask(prompt)) for prompt in shorts], await running]

        for (status, answer, _), prompt in zip(asyncio.run(scenario()), [*shorts, long], strict=True):
            assert status == 200, answer
            assert answer["output_ids"] == reference.greedy(prompt, 1), f"{len(prompt)} tokens"
        return preemptions(prefill) > before

    until_seen(once, "a batch preempts")


@on(*SETUPS)[0]
def test_grammars_of_what_is_paused_and_of_what_preempts(prefill: Prefill) -> None:
    """Each grammar masks its own request's token, whatever batch ran in between."""
    wanted = {"[0-9]{4}": str.isdigit, "[a-z]{4}": str.islower, "[A-Z]{4}": str.isupper}
    sizes = [4000, 3000, *([40] * 24), 3500]
    before = preemptions(prefill)

    async def scenario(seed: int) -> list[tuple[str, str]]:
        async with load.session() as http:
            regexes = [list(wanted)[i % len(wanted)] for i in range(len(sizes))]
            bodies = [
                ask(ids(seed + i, n), regex=regex) for i, (n, regex) in enumerate(zip(sizes, regexes, strict=True))
            ]
            answers = await asyncio.gather(*(post(http, prefill, body, 0.05 * i) for i, body in enumerate(bodies)))
            assert all(status == 200 for status, _, _ in answers), answers
            return [(regex, answer["text"]) for regex, (_, answer, _) in zip(regexes, answers, strict=True)]

    def once(i: int) -> bool:
        for regex, text in asyncio.run(scenario(200 + 1000 * i)):
            assert wanted[regex](text), (regex, text)
        return preemptions(prefill) > before

    until_seen(once, "a batch preempts")


@on(*SETUPS)[0]
def test_nothing_of_lower_priority_preempts(prefill: Prefill, reference: Reference) -> None:
    def first_of(long: int, short: int, seed: int) -> str:
        """Return which request was answered first: a running long prompt or a short prompt that arrived meanwhile.
        Empty if the short prompt arrived before or after."""
        prompt, other, before = ids(seed, 4500), ids(seed + 1, 40), preemptions(prefill)

        async def scenario() -> tuple[Any, Any]:
            async with load.session() as http:
                running = asyncio.ensure_future(post(http, prefill, {**ask(prompt), "priority": long}))
                await until_slices_run(http, prefill, running)
                return await post(http, prefill, {**ask(other), "priority": short}), await running

        answer, whole = asyncio.run(scenario())
        assert (answer[0], whole[0]) == (200, 200), (answer, whole)
        assert answer[1]["output_ids"] == reference.greedy(other, 1)
        assert whole[1]["output_ids"] == reference.greedy(prompt, 1)
        assert short >= long or preemptions(prefill) == before
        if not came_amid(answer[1], whole[1]):
            return ""
        return "long" if whole[2] <= answer[2] else "short"

    def waits(i: int) -> bool:
        found = first_of(5, 1, 300 + 1000 * i)
        assert found != "short"
        return found == "long"

    until_seen(waits, "a short request of lower priority waits")
    until_seen(lambda i: first_of(5, 5, 310 + 1000 * i) == "short", "one of the same preempts")
    until_seen(lambda i: first_of(1, 5, 320 + 1000 * i) == "short", "one of higher priority preempts")
