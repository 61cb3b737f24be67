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
)


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
