"""The index of prefixes that an instance has seen, against what was really sent."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("sglang_router")

from sglang_router_laps.prompts.prefixes import (
    BLOCK_BYTES,
    Fingerprint,
    PrefixIndex,
    fingerprint,
    measure,
)
from sglang_router_laps.prompts.reading import ANSWER_TOKENS, GENERATE, answer_tokens, read_prompt
from sglang_router_laps.prompts.tokens import ByteCounter


@given(st.binary(max_size=4000), st.binary(max_size=2000))
def test_what_is_held_is_the_common_prefix_in_whole_blocks(base: bytes, more: bytes) -> None:
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
def test_the_index_is_bounded_and_what_it_holds_of_a_prompt_is_a_prefix(prompts: list[bytes]) -> None:
    index = PrefixIndex(10 * 64)
    for text in prompts:
        index.add(fingerprint(text))
        assert len(index) <= 10
    for text in prompts:
        print_ = fingerprint(text)
        inside = [index.depth(Fingerprint((h,), 0.0)) == 1 for h in print_.hashes]
        assert inside == sorted(inside, reverse=True)


def test_adapters_and_salts_are_part_of_a_prefix() -> None:
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


def test_a_server_that_has_forgotten_a_prefix_is_taken_to_have_forgotten_what_is_older() -> None:
    index = PrefixIndex(1 << 20)
    texts = [b"%08d" % i * 512 for i in range(8)]
    for text in texts:
        index.add(fingerprint(text))
    before = len(index)
    index.correct(1000, 900)
    assert len(index) == before
    index.correct(1000, 0)
    assert len(index) == before * 3 // 4
    assert [index.depth(fingerprint(t)) > 0 for t in texts] == [False] * 2 + [True] * 6


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        ({}, ANSWER_TOKENS),
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 7, "max_tokens": 5}, 7),
        ({"sampling_params": {"max_new_tokens": 9}}, 9),
        ({"max_tokens": 10**18}, ANSWER_TOKENS),
        ({"max_tokens": True}, ANSWER_TOKENS),
        ({"max_tokens": -1, "sampling_params": []}, ANSWER_TOKENS),
    ],
)
def test_an_answer_is_as_long_as_asked_but_no_longer_than_usual(body: dict[str, object], tokens: int) -> None:
    assert answer_tokens(body) == tokens
