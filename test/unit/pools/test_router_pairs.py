"""Choice of the server pair for a request, also after failed attempts."""

from __future__ import annotations

import pytest
from choosing import choose_and_record
from laps_core.pools.choice import Pools, TriedServers
from laps_core.pools.config import AllocConfig
from laps_core.pools.instances import Instance
from laps_core.pools.prefill import PrefillInstance
from laps_core.pools.prefixes import Ask, fingerprint

Way = tuple[PrefillInstance, Instance]


def pairs(prefills: int = 2, decodes: int = 2) -> Pools:
    servers = [(f"http://p{i}:1", 8998) for i in range(prefills)]
    return Pools(
        servers,
        AllocConfig(spill="off", initial_short=max(1, prefills // 2)),
        lambda: 0.0,
        decoders=[f"http://d{i}:1" for i in range(decodes)],
    )


def choose(p: Pools, tried: TriedServers) -> Way:
    found = p.choose_pair(Ask(10), tried)
    assert found is not None
    return found[0].instance, found[1]


def test_every_pair_is_tried_before_any_repeats() -> None:
    p, tried = pairs(2, 3), TriedServers()
    ways: list[Way] = []
    while p.has_untried_pair(tried, now=True):
        ways.append(choose(p, tried))
        tried.pairs.add(ways[-1])
    assert len(ways) == len(set(ways)) == 6
    # Two servers that took no part in the first failure come before the first two.
    assert not set(ways[0]) & set(ways[1])
    assert choose(p, tried) in ways


def test_failed_server_is_avoided_while_another_exists() -> None:
    p = pairs()
    sick = p.instances[0]
    tried = TriedServers(servers={sick, p.decoders[0]})
    assert choose(p, tried) == (p.instances[1], p.decoders[1])
    tried.servers.add(p.decoders[1])
    assert not p.has_untried_pair(tried, now=False)
    assert choose(p, tried)[0] is not sick


def test_pair_with_open_breaker_is_untried_only_for_later() -> None:
    p = pairs(2, 1)
    for _ in range(10):
        p.decoders[0].breaker.failed()
    assert not p.has_untried_pair(TriedServers(), now=True)
    assert p.has_untried_pair(TriedServers(), now=False)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_missing_role_names_role_without_healthy_server(role: str) -> None:
    p = pairs()
    for i in p.instances if role == "prefill" else p.decoders:
        i.healthy = False
    assert p.choose_pair(Ask(10), TriedServers()) is None
    assert p.missing_role() == role


def test_decode_choice_counts_tokens_not_requests() -> None:
    p = pairs(2, 2)
    full, many = p.decoders
    with full.lease(30_000), many.lease(100), many.lease(100):
        assert choose(p, TriedServers())[1] is many


def test_long_prompt_avoids_too_small_server_while_possible() -> None:
    p = pairs(2, 1)
    for i in p.instances:
        i.pool = "both"
    small, large = p.instances
    small.longest = 1000
    for _ in range(3):
        found = choose_and_record(p, Ask(5000))
        assert found is not None
        assert found.instance is large
    large.healthy = False
    found = choose_and_record(p, Ask(5000))
    assert found is not None
    assert found.instance is small, "whether it is refused is the server's to say"


def test_undivided_fleet_separates_short_and_long_requests() -> None:
    p = Pools([(f"http://p{i}:1", 1) for i in range(3)], AllocConfig(), lambda: 0.0)
    found = choose_and_record(p, Ask(20_000))
    assert found is not None
    with found.lease():
        assert {choose_and_record(p, Ask(50)).instance for _ in range(5)}.isdisjoint({found.instance})  # type: ignore[union-attr]
        other = choose_and_record(p, Ask(20_000))
        assert other is not None
        assert other.instance is not found.instance


def test_easy_deadline_favors_server_with_least_work() -> None:
    p = Pools([(f"http://p{i}:1", 1) for i in range(2)], AllocConfig(), lambda: 0.0)
    text = b"".join(b"%07d" % i for i in range(4000))
    first = choose_and_record(p, Ask(7000, [fingerprint(text)]))
    assert first is not None
    with first.instance.lease(9000, "long", 3.0):
        for slo_s, same in ((None, False), (1.0, False), (10.0, True)):
            other = next(i for i in p.instances if i is not first.instance)
            other.prefixes.clear()
            found = choose_and_record(p, Ask(7050, [fingerprint(text)], slo_s=slo_s))
            assert found is not None
            assert (found.instance is first.instance) == same, slo_s
