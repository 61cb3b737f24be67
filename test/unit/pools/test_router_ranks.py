"""Choice of the DP rank of a prefill server for a request."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from choosing import choose_and_record
from hypothesis import given, settings
from hypothesis import strategies as st
from laps_core.pools.choice import Choice, Pools
from laps_core.pools.config import AllocConfig
from laps_core.pools.outlook import Learnt
from laps_core.pools.prefill import PREFIX_TOKENS, PREFIX_TOKENS_MOST, PrefillInstance
from laps_core.pools.prefixes import SHARERS, Ask, Fingerprint, fingerprint
from laps_core.pools.ranks import RANKS_MAX, Rank


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


DOCUMENT = b"".join(b"%07d" % i for i in range(4000))


def fleet(*ranks: int, initial_short: int | None = None) -> Pools:
    """Return a fleet with one server for each number of ranks."""
    servers = [(f"http://p{i}:1", 1) for i in range(len(ranks))]
    pools = Pools(servers, AllocConfig(initial_short=initial_short), Clock(), fixed=False)
    for instance, n in zip(pools.instances, ranks, strict=True):
        instance.set_rank_count(n)
    return pools


def choose(pools: Pools, tokens: int, text: bytes = b"") -> Choice:
    found = choose_and_record(pools, Ask(tokens, [fingerprint(text)] if text else []))
    assert found is not None
    return found


def number(choice: Choice) -> int:
    assert choice.rank is not None
    return choice.rank.number


def test_server_with_one_dp_rank_is_chosen_as_whole() -> None:
    choice = choose(fleet(1, 1), 100)
    assert choice.rank is None
    assert choice.place is choice.instance


def test_conversation_stays_at_one_dp_rank() -> None:
    pools = fleet(4, 4)
    first = choose(pools, 7000, DOCUMENT)
    for _ in range(3):
        again = choose(pools, 7050, DOCUMENT + b"and one more question?")
        assert (again.instance, again.rank) == (first.instance, first.rank)
        assert again.length_class == "short"
    holding = [p for i in pools.instances for p in i.places if len(p.prefixes)]
    assert holding == [first.rank]
    assert first.instance.prefix_blocks == len(holding[0].prefixes)


def test_requests_without_prefix_spread_over_all_dp_ranks() -> None:
    pools = fleet(3, 1)
    with ExitStack() as held:
        seen = []
        for _ in range(8):
            choice = choose(pools, 5000)
            held.enter_context(choice.lease())
            seen.append((choice.instance.url, choice.rank and choice.rank.number))
        assert all(seen.count(place) == 2 for place in seen)
        assert [p.outstanding for i in pools.instances for p in i.places] == [2] * 4
    # If all are idle, the place with the least work so far is chosen.
    idle = set()
    for _ in range(3):
        choice = choose(pools, 5000)
        choice.lease().__enter__().end()
        idle.add(choice.place)
    assert len(idle) == 3


def test_busy_dp_rank_wins_only_if_prefix_outweighs_wait() -> None:
    pools = fleet(2, 2)
    first = choose(pools, 7000, DOCUMENT)
    lease = first.instance.lease(50_000, "long", 5.0, first.rank)
    with lease:
        other = choose(pools, 7050, DOCUMENT + b"more")
        assert other.rank is not first.rank
    pools = fleet(2, 2)
    first = choose(pools, 7000, DOCUMENT)
    with first.instance.lease(500, "long", 0.05, first.rank):
        assert choose(pools, 7050, DOCUMENT + b"more").rank is first.rank


def test_shared_prefix_is_copied_to_one_short_dp_rank() -> None:
    pools = fleet(2, 2, initial_short=1)
    system = b"You are a helpful assistant. ".ljust(1500, b".")
    chosen = []
    for i in range(20):
        text = system + b"\n<user>%d: what is that about?" % i
        chosen.append(choose(pools, len(text) // 4, text))
    assert [c.instance.pool for c in chosen] == ["long"] * SHARERS + ["short"] * (20 - SHARERS)
    assert len({number(c) for c in chosen[SHARERS:]}) == 1
    assert sum(c.why == "copy" for c in chosen) == 1


def test_server_work_is_mean_over_dp_ranks() -> None:
    (instance,) = fleet(4).instances
    rank = instance.places[2]
    with instance.lease(1000, "long", 2.0, rank.rank):
        assert instance.outlook.waiting(0.0) == (0.0, 0.5)
        assert rank.outlook.waiting(0.0) == (0.0, 2.0)
        assert [p.outstanding_tokens for p in instance.places] == [0, 0, 1000, 0]
        assert instance.outstanding_tokens == 1000
    assert instance.outlook.waiting(0.0) == rank.outlook.waiting(0.0) == (0.0, 0.0)
    assert instance.outlook.done == (0.0, 0.5)


def test_lease_of_removed_dp_rank_ends_cleanly() -> None:
    pools = fleet(3, 3)
    (instance, _) = pools.instances
    old = instance.places[2]
    with instance.lease(1000, "long", 3.0, old.rank):
        instance.set_rank_count(2)
        assert old not in instance.places
        assert [p.outstanding for p in instance.places] == [0, 0]
    assert instance.outlook.waiting(0.0) == (0.0, 0.0)
    assert (instance.outstanding, instance.outstanding_tokens, old.outstanding) == (0, 0, 0)


def test_forget_clears_dp_ranks_and_prefixes() -> None:
    pools = fleet(3)
    (instance,) = pools.instances
    choose(pools, 7000, DOCUMENT)
    instance.forget()
    assert instance.places == (instance,)
    assert instance.prefix_blocks == 0


def test_forget_prefixes_empties_every_dp_rank() -> None:
    pools = fleet(3, 1)
    for i in range(8):
        choose(pools, 7000, b"%d" % i + DOCUMENT).lease().__enter__()
    assert all(i.prefix_blocks for i in pools.instances)
    pools.forget_prefixes()
    assert not any(i.prefix_blocks for i in pools.instances)
    assert len(pools.instances[0].places) == 3


@pytest.mark.parametrize("ranks", [0, 1, RANKS_MAX + 1, 10**30])
def test_invalid_dp_rank_count_is_treated_as_one(ranks: int) -> None:
    instance = PrefillInstance("http://h:1", 1, clock=Clock())
    instance.set_rank_count(ranks)
    assert instance.places == (instance,)


@given(st.integers(2, RANKS_MAX), st.data())
def test_bootstrap_room_identifies_dp_rank(of: int, data: st.DataObject) -> None:
    rank = Rank(
        PrefillInstance("http://h:1", 1, clock=Clock()), data.draw(st.integers(0, of - 1)), of, Learnt(), 1 << 20
    )
    numbers = data.draw(st.lists(st.integers(0, (1 << 62) - 1), min_size=1))
    rooms = [rank.room(n) for n in numbers]
    assert {room % of for room in rooms} == {rank.number}
    assert all(0 <= room < 1 << 63 and abs(room - n) < of for room, n in zip(rooms, numbers, strict=True))


@settings(deadline=None)
@given(st.sampled_from([2, 3, 8, 9, 64]))
def test_total_prefixes_of_all_dp_ranks_are_bounded(ranks: int) -> None:
    instance = PrefillInstance("http://h:1", 1, clock=Clock())
    instance.set_rank_count(ranks)
    long = fingerprint(range(PREFIX_TOKENS + 64))
    for p in instance.places:
        p.prefixes.add(long)
    assert instance.prefix_blocks * 64 <= 8 * PREFIX_TOKENS


@pytest.mark.parametrize(
    ("ranks", "told", "held"), [(1, 640, 640), (2, 640, 1280), (16, 640, 8 * 640), (1, None, 1 << 20)]
)
def test_prefix_index_size_follows_reported_cache_size(ranks: int, told: int | None, held: int) -> None:
    instance = PrefillInstance("http://h:1", 1, clock=Clock())
    instance.set_rank_count(ranks)
    long = fingerprint(range(PREFIX_TOKENS + 64))
    for p in instance.places:
        p.prefixes.add(long)
    instance.set_cache_size(told)
    for p in instance.places:
        p.prefixes.add(fingerprint(range(-64, 64)))
        p.prefixes.add(long)
    assert instance.prefix_blocks * 64 == held


def test_prefix_index_size_is_capped_for_huge_cache() -> None:
    instance = PrefillInstance("http://h:1", 1, clock=Clock())
    instance.set_cache_size(1 << 40)
    instance.prefixes.add(Fingerprint(tuple(range(1 << 20)), 1.0))
    assert len(instance.prefixes) * 64 == PREFIX_TOKENS_MOST


def test_dp_ranks_update_shared_latency_model_once() -> None:
    clock = Clock()
    pools = Pools([(f"http://p{i}:1", 1) for i in range(2)], AllocConfig(), clock)
    pools.instances[0].set_rank_count(2)
    lease = pools.instances[0].lease(1000, "long", 0.1, pools.instances[0].places[1].rank)
    with lease:
        clock.now = 2.0
        lease.end()
    assert pools.learnt.model.linear == pytest.approx(2e-3)
    assert all(p.outlook.model is pools.learnt.model for i in pools.instances for p in i.places)
