from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from laps_core.histogram import BUCKETS, LengthCount, bucket_of, upper


@given(st.integers(1, 1 << 22))
def test_a_bucket_holds_what_is_longer_than_the_one_before_and_no_longer_than_its_end(tokens: int) -> None:
    bucket = bucket_of(tokens)
    assert tokens <= upper(bucket)
    assert bucket == 0 or tokens > upper(bucket - 1)


@given(st.lists(st.tuples(st.integers(1, 1 << 40), st.integers(0, 1 << 40)), max_size=50))
def test_every_request_is_counted_once(came: list[tuple[int, int]]) -> None:
    count = LengthCount()
    for new, cached in came:
        count.add(new, cached)
    told = count.told(1.0)
    assert sum(b.requests for b in told.buckets) == len(came)
    assert sum(b.new_tokens for b in told.buckets) == sum(new for new, _ in came)
    assert sum(b.cached_tokens for b in told.buckets) == sum(cached for _, cached in came)
    assert len(told.buckets) <= BUCKETS
