"""Slices together with what else a server does: HiCache, grammars, priorities."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import http_load as load
from served import NORMAL_LOOP, Prefill, Reference, ids, on

from .slicing import ask, post, setup, until_slices_run

HICACHE = (
    "--enable-hierarchical-cache", "--hicache-ratio", "4", "--hicache-io-backend", "direct",
    "--hicache-mem-layout", "layer_first", "--hicache-write-policy", "write_through",
)  # fmt: skip
POOL = 16384
MORE = (*HICACHE, "--enable-priority-scheduling", "--grammar-backend", "xgrammar", "--max-total-tokens", str(POOL))
pytestmark = on(setup("features-normal", *MORE, *NORMAL_LOOP), setup("features-overlap", *MORE))


def preemptions(prefill: Prefill) -> int:
    return int(prefill.get("/laps_status")["preemption"]["by_short_batches"])


def test_prefixes_that_come_back_from_the_host_while_batches_preempt(prefill: Prefill, reference: Reference) -> None:
    rng = random.Random(5)
    documents = [ids(20 + i, 1500) for i in range(8)]
    longs = [document + ids(40 + i, 700 + 300 * i) for i, document in enumerate(documents[:4])]
    shorts = [documents[4 + i % 4] + ids(60 + i, rng.randint(5, 90)) for i in range(12)]
    plain = [ids(80 + i, rng.randint(5, 90)) for i in range(24)]
    before = preemptions(prefill)

    async def scenario() -> list[Any]:
        async with load.session() as http:
            for prompt in documents:
                assert (await post(http, prefill, ask(prompt)))[0] == 200
            # More than the device holds: the documents are left on the host only.
            for i in range(POOL // 3000 + 1):
                assert (await post(http, prefill, ask(ids(90 + i, 3000))))[0] == 200
            sent = [post(http, prefill, ask(p), 0.3 * i) for i, p in enumerate(longs)]
            sent += [post(http, prefill, ask(p), rng.random() * 2.0) for p in shorts + plain]
            return list(await asyncio.gather(*sent))

    answers = asyncio.run(scenario())
    assert all(status == 200 for status, _, _ in answers), answers
    cached = [answer["meta_info"]["cached_tokens_details"] or {"host": 0} for _, answer, _ in answers]
    assert sum(details["host"] >= 1400 for details in cached) >= 4, cached
    assert preemptions(prefill) > before
    for (_, answer, _), prompt in zip(answers, [*longs, *shorts, *plain], strict=True):
        assert answer["output_ids"] == reference.greedy(prompt, 1), f"{len(prompt)} tokens"
    prefill.all_tokens_are_free()


def test_a_prefix_that_comes_back_for_the_paused_batch_is_waited_for(prefill: Prefill, reference: Reference) -> None:
    document, before = ids(120, 1500), preemptions(prefill)
    long, shorts = document + ids(121, 2500), [document + ids(122 + i, 20) for i in range(4)]

    async def scenario() -> list[Any]:
        async with load.session() as http:
            assert (await post(http, prefill, ask(document)))[0] == 200
            for i in range(POOL // 3000 + 1):
                assert (await post(http, prefill, ask(ids(130 + i, 3000))))[0] == 200
            running = asyncio.ensure_future(post(http, prefill, ask(long)))
            await until_slices_run(http, prefill, running)
            return [*[await post(http, prefill, ask(prompt)) for prompt in shorts], await running]

    for (status, answer, _), prompt in zip(asyncio.run(scenario()), [*shorts, long], strict=True):
        assert status == 200, answer
        assert answer["output_ids"] == reference.greedy(prompt, 1), f"{len(prompt)} tokens"
    assert preemptions(prefill) > before


def test_grammars_of_what_is_paused_and_of_what_preempts(prefill: Prefill, reference: Reference) -> None:
    """Each grammar masks its own request's token, whichever batch ran in between."""
    wanted = {"[0-9]{4}": str.isdigit, "[a-z]{4}": str.islower, "[A-Z]{4}": str.isupper}
    sizes = [4000, 3000, *([40] * 24), 3500]
    before = preemptions(prefill)

    async def scenario() -> list[tuple[str, str]]:
        async with load.session() as http:
            regexes = [list(wanted)[i % len(wanted)] for i in range(len(sizes))]
            bodies = [
                ask(ids(200 + i, n), regex=regex) for i, (n, regex) in enumerate(zip(sizes, regexes, strict=True))
            ]
            answers = await asyncio.gather(*(post(http, prefill, body, 0.05 * i) for i, body in enumerate(bodies)))
            assert all(status == 200 for status, _, _ in answers), answers
            return [(regex, answer["text"]) for regex, (_, answer, _) in zip(regexes, answers, strict=True)]

    for regex, text in asyncio.run(scenario()):
        assert wanted[regex](text), (regex, text)
    assert preemptions(prefill) > before


def test_nothing_of_lower_priority_preempts(prefill: Prefill, reference: Reference) -> None:
    async def first_of(long: int, short: int, seed: int) -> str:
        """Which of two is answered first: a long prompt on the device, or a short one that comes then."""
        async with load.session() as http:
            prompt, other = ids(seed, 4500), ids(seed + 1, 40)
            running = asyncio.ensure_future(post(http, prefill, {**ask(prompt), "priority": long}))
            await until_slices_run(http, prefill, running)
            answer = await post(http, prefill, {**ask(other), "priority": short})
            whole = await running
            assert (answer[0], whole[0]) == (200, 200), (answer, whole)
            assert answer[1]["output_ids"] == reference.greedy(other, 1)
            assert whole[1]["output_ids"] == reference.greedy(prompt, 1)
            return "long" if whole[2] < answer[2] else "short"

    assert asyncio.run(first_of(5, 1, 300)) == "long"
    assert asyncio.run(first_of(5, 5, 310)) == "short"
    assert asyncio.run(first_of(1, 5, 320)) == "short"
