from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from laps_core.histogram import BUCKETS, LengthCount, bucket_of, upper
from laps_core.protocol import read_status


@given(st.integers(1, 1 << 22))
def test_bucket_bounds_enclose_token_count(tokens: int) -> None:
    bucket = bucket_of(tokens)
    assert tokens <= upper(bucket)
    assert bucket == 0 or tokens > upper(bucket - 1)


@given(st.lists(st.tuples(st.integers(1, 1 << 40), st.integers(0, 1 << 40)), max_size=50))
def test_every_request_is_counted_once(came: list[tuple[int, int]]) -> None:
    count = LengthCount()
    for new, cached in came:
        count.add(new, cached)
    told = count.to_lengths(1.0)
    assert sum(b.requests for b in told.buckets) == len(came)
    assert sum(b.new_tokens for b in told.buckets) == sum(new for new, _ in came)
    assert sum(b.cached_tokens for b in told.buckets) == sum(cached for _, cached in came)
    assert len(told.buckets) <= BUCKETS


def test_router_status_reports_lengths_of_routed_requests() -> None:
    pytest.importorskip("sglang_router")
    from laps_core.pools.choice import Choice
    from laps_core.pools.config import AllocConfig
    from sglang_router.router_args import RouterArgs
    from sglang_router_laps.http.status import status
    from sglang_router_laps.router import Router

    args = RouterArgs(prefill_urls=[("http://p:1", 1), ("http://p:2", 1)], decode_urls=["http://d:1"])
    router = Router(args, AllocConfig())
    router.journal.note_choice(Choice(router.pools.instances[0], "short", 100), 300)
    lengths = read_status(json.dumps(status(router)).encode()).lengths
    assert lengths is not None
    assert [(b.requests, b.new_tokens, b.cached_tokens) for b in lengths.buckets] == [(1, 100, 200)]
