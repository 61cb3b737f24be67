"""Prefixes of an instance and their weight against load, at the limits."""

from __future__ import annotations

import json

import pytest
from choosing import choose_and_record
from laps_core.pools.choice import Pools
from laps_core.pools.config import AllocConfig
from laps_core.pools.prefill import PrefillInstance
from laps_core.pools.prefixes import Ask, PrefixIndex, fingerprint

TEXT = b"".join(b"%08d" % i for i in range(512))
"""Text of 16 blocks."""


@pytest.mark.parametrize(("size", "blocks"), [(0, 0), (255, 0), (256, 1), (511, 1), (512, 2), (513, 2)])
def test_fingerprint_hashes_only_whole_blocks(size: int, blocks: int) -> None:
    assert len(fingerprint(bytes(size)).hashes) == blocks
    assert len(fingerprint([7] * (size // 4)).hashes) == blocks


def test_media_is_assigned_to_block_containing_media_end() -> None:
    assert fingerprint(TEXT, (1, 256, 257, 4096)).media == (0, 0, 1, 15)


def test_prefix_index_keeps_most_recently_used_blocks() -> None:
    index = PrefixIndex(8 * 64)
    index.add(fingerprint(TEXT))
    assert (len(index), index.depth(fingerprint(TEXT))) == (8, 8)
    other = fingerprint(TEXT[8:1800])
    index.add(other)
    assert (len(index), index.depth(other), index.depth(fingerprint(TEXT))) == (8, 7, 1)


def pools(n: int = 4, **config: object) -> Pools:
    divided = {"initial_short": n // 2, **config}
    return Pools([(f"http://h{i}:1", 8998) for i in range(n)], AllocConfig.parse({}, json.dumps(divided)), lambda: 0.0)


def route(p: Pools, tokens: int, text: bytes = b"") -> tuple[PrefillInstance, str, int, bool]:
    choice = choose_and_record(p, Ask(tokens, [fingerprint(text)] if text else []))
    assert choice is not None
    return choice.instance, choice.length_class, choice.new_tokens, choice.why == "spill"


def test_long_request_spills_only_above_load_limits() -> None:
    p = pools(2, spill="both")
    short, long = p.instances
    with long.lease(2048):
        assert route(p, 5000)[0] is long
    with short.lease(1000), long.lease(15_000):
        assert route(p, 5000)[0] is long, "not flooded"
    with short.lease(1), long.lease(8 * 2048):
        assert route(p, 5000)[0] is long, "nor now"
    with short.lease(2125), long.lease(17_000):
        assert route(p, 5000)[0] is short


@pytest.mark.parametrize(("before", "pool"), [(200, "short"), (5000, "long")])
def test_new_tokens_at_threshold_are_short_despite_longer_prompt(before: int, pool: str) -> None:
    p = pools()
    home, *_ = route(p, before, TEXT[:2048])
    assert home.pool == pool
    assert route(p, 512, TEXT) == (home, "short", 256, False)


@pytest.mark.parametrize(
    ("tokens", "busy_s", "stays"),
    [
        (1000, 0.199, True),  # elsewhere 500 more tokens, 0.1 ms each, counted four times
        (1000, 0.201, False),
        (4096, 0.818, True),
        (4096, 0.821, False),
    ],
)
def test_server_with_prefix_is_chosen_unless_wait_outweighs_saving(tokens: int, busy_s: float, stays: bool) -> None:
    p = pools(3, initial_short=1)
    home, *_ = route(p, 5000, TEXT[:2048])
    with home.lease(1, "long", busy_s):
        assert (route(p, tokens, TEXT)[0] is home) == stays


def test_servers_take_turns_without_cached_prefix() -> None:
    p = pools(3, initial_short=1)
    taken = []
    for i in range(4):
        taken.append(route(p, 5000, b"%08d" % i + TEXT)[0])
        with taken[-1].lease(5000):
            pass
    assert taken[0] is taken[2] is not taken[1] is taken[3]


def test_avoided_instance_is_chosen_only_as_last_resort() -> None:
    p = pools(3, initial_short=2)
    first, second, long = p.instances
    for avoid, taken in (((), first), ((first,), second), ((first, second), long), (p.instances, first)):
        choice = choose_and_record(p, Ask(10), avoid)
        assert choice is not None
        assert choice.instance is taken
