"""The benchmark of groups: its load, its servers, its figures."""

from __future__ import annotations

import pytest
from laps_plan.profile import Profile

from benchmark import groups


def test_the_load_is_the_same_for_all_and_mixed() -> None:
    found = groups.arrivals(50.0, 40.0, "1/0")
    assert found == groups.arrivals(50.0, 40.0, "1/0")
    long = sum(job.new > groups.SHORT for job in found) / len(found)
    assert 0.02 < long < 0.09
    assert 1500 < len(found) < 2500


def test_a_rank_has_the_same_chunk_whatever_their_number() -> None:
    for ranks in (2, 8):
        stock, laps = groups.variants(ranks)
        assert (stock.stock, laps.stock) == (True, False)
        sizes = [int(v.args[v.args.index("--chunked-prefill-size") + 1]) for v in (stock, laps)]
        assert sizes == [ranks * groups.STOCK_CHUNK, ranks * groups.CHUNK]


def test_slowdown_is_over_the_time_alone_in_the_group() -> None:
    profile = Profile.load(groups.PROFILE).with_ranks(4).stretched(2.0)
    assert profile.group is not None
    alone = [profile.group.lone_s(n, 0, groups.CHUNK) for n in (100, 5000)]
    seen = groups.figures_of([100, 5000], [3.0 * t for t in alone], profile)
    assert seen["mean slowdown"] == pytest.approx(3.0)
    assert (seen["short P90"], seen["long P90"]) == pytest.approx((3.0 * alone[0], 3.0 * alone[1]))
