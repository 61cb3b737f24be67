"""Index of the prefixes that an instance has seen, compared with the prompts that were sent."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("sglang_router")

from laps_core.pools.prefixes import (
    BLOCK_BYTES,
    MEDIA_TOKENS,
    PROMPTS_MAX,
    Ask,
    Fingerprint,
    PrefixIndex,
    fingerprint,
)
from sglang_router_laps.prompts.measure import measure
from sglang_router_laps.prompts.reading import ANSWER_TOKENS, GENERATE, Prompt, answer_tokens, read_prompt
from sglang_router_laps.prompts.tokens import ByteCounter


@given(st.binary(max_size=4000), st.binary(max_size=2000))
def test_index_depth_is_common_prefix_in_whole_blocks(base: bytes, more: bytes) -> None:
    index = PrefixIndex(1 << 20)
    index.add(fingerprint(base))
    blocks = len(base) // BLOCK_BYTES
    prompt = base[: blocks * BLOCK_BYTES] + more
    shared = 0
    while shared < min(len(base), len(prompt)) // BLOCK_BYTES * BLOCK_BYTES and (
        base[shared : shared + BLOCK_BYTES] == prompt[shared : shared + BLOCK_BYTES]
    ):
        shared += BLOCK_BYTES
    found = fingerprint(prompt)
    assert index.depth(found) == shared // BLOCK_BYTES
    assert index.depth(found) * found.covered == pytest.approx(shared / len(prompt) if prompt else 0.0)


@given(st.lists(st.binary(min_size=256, max_size=3000), min_size=1, max_size=30))
def test_index_is_bounded_and_retains_only_prefixes_of_prompts(prompts: list[bytes]) -> None:
    index = PrefixIndex(10 * 64)
    for text in prompts:
        index.add(fingerprint(text))
        assert len(index) <= 10
    for text in prompts:
        print_ = fingerprint(text)
        inside = [index.depth(Fingerprint((h,), 0.0)) == 1 for h in print_.hashes]
        assert inside == sorted(inside, reverse=True)


def test_adapters_and_cache_salts_distinguish_prefixes() -> None:
    def prints(**more: object) -> Fingerprint:
        body = {"text": "a" * 4000, **more}
        return measure(read_prompt(GENERATE, body), ByteCounter(), 0).prompts[0]

    index = PrefixIndex(1 << 20)
    index.add(prints(model="base"))
    assert index.depth(prints(model="another name")) > 0
    for other in ({"lora_path": "x"}, {"cache_salt": "x"}, {"extra_key": "x"}, {"model": "base:x"}):
        assert index.depth(prints(**other)) == 0, other
        index.add(prints(**other))
        assert index.depth(prints(**other)) > 0, other


def test_overestimated_prefix_drops_oldest_quarter_of_index() -> None:
    index = PrefixIndex(1 << 20)
    texts = [b"%08d" % i * 512 for i in range(8)]
    for text in texts:
        index.add(fingerprint(text))
    before = len(index)
    for expected, found in ((1000, 900), (1000, 500), (64, 0)):
        index.correct(expected, found)
        assert len(index) == before
    index.correct(1000, 499)
    assert len(index) == before * 3 // 4
    assert [index.depth(fingerprint(t)) > 0 for t in texts] == [False] * 2 + [True] * 6


def test_cached_share_of_batch_is_mean_over_prompts() -> None:
    index = PrefixIndex(1 << 20)
    held, other = fingerprint(b"a" * 1024), fingerprint(b"b" * 1024)
    index.add(held)
    assert Ask(1000, [held, other]).new(index) == 500
    assert Ask(1000, [held, held]).new(index) == 1


def test_number_of_fingerprinted_prompts_is_bounded() -> None:
    body = {"input_ids": [[i] * 64 for i in range(2 * PROMPTS_MAX)]}
    assert len(measure(read_prompt(GENERATE, body), ByteCounter(), 0).prompts) == PROMPTS_MAX
    mixed = Prompt(texts=["a" * 256] * 40, ids=[[1] * 64] * 40)
    assert len(measure(mixed, ByteCounter(), 0).prompts) == PROMPTS_MAX


def test_each_media_item_adds_fixed_number_of_tokens() -> None:
    assert Ask(10, media=2).total == 10 + 2 * MEDIA_TOKENS
    assert Ask(10, [Fingerprint((1,), 1.0, (0,))], media=2).total == 10 + 3 * MEDIA_TOKENS


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        ({}, ANSWER_TOKENS),
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 7, "max_tokens": 5}, 7),
        ({"sampling_params": {"max_new_tokens": 9}}, 9),
        ({"max_tokens": 10**18}, ANSWER_TOKENS),
        ({"max_tokens": 0}, ANSWER_TOKENS),
        ({"max_tokens": True}, ANSWER_TOKENS),
        ({"max_tokens": -1, "sampling_params": []}, ANSWER_TOKENS),
    ],
)
def test_answer_tokens_use_requested_limit_up_to_default(body: dict[str, object], tokens: int) -> None:
    assert answer_tokens(body) == tokens
