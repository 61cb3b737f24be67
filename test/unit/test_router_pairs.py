"""Which two servers a request goes to, and which after attempts that failed."""

from __future__ import annotations

import pytest

pytest.importorskip("sglang_router")

from sglang_router_laps.config import AllocConfig
from sglang_router_laps.pools.choice import Pools, Tried
from sglang_router_laps.prompts.prefixes import Ask
from sglang_router_laps.servers.instances import Instance, PrefillInstance

Way = tuple[PrefillInstance, Instance]


def pairs(prefills: int = 2, decodes: int = 2) -> Pools:
    servers = [(f"http://p{i}:1", 8998) for i in range(prefills)]
    return Pools(servers, AllocConfig(spill="off"), decoders=[f"http://d{i}:1" for i in range(decodes)])


def choose(p: Pools, tried: Tried) -> Way:
    found = p.choose_pair(Ask(10), tried)
    assert found is not None
    return found[0].instance, found[1]


def test_every_pair_is_tried_once_before_any_is_again() -> None:
    p, tried = pairs(2, 3), Tried()
    ways: list[Way] = []
    while p.left(tried, now=True):
        ways.append(choose(p, tried))
        tried.ways.add(ways[-1])
    assert len(ways) == len(set(ways)) == 6
    # Two servers that had no part in the first failure come before either of the first two.
    assert not set(ways[0]) & set(ways[1])
    assert choose(p, tried) in ways


def test_a_server_that_failed_is_left_while_there_is_another() -> None:
    p = pairs()
    sick = p.instances[0]
    tried = Tried(servers={sick, p.decoders[0]})
    assert choose(p, tried) == (p.instances[1], p.decoders[1])
    tried.servers.add(p.decoders[1])
    assert not p.left(tried, now=False)
    assert choose(p, tried)[0] is not sick


def test_a_server_on_trial_counts_for_later_only() -> None:
    p = pairs(2, 1)
    for _ in range(10):
        p.decoders[0].breaker.failed()
    assert not p.left(Tried(), now=True)
    assert p.left(Tried(), now=False)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_role_without_anybody_healthy_is_named(role: str) -> None:
    p = pairs()
    for i in p.instances if role == "prefill" else p.decoders:
        i.healthy = False
    assert p.choose_pair(Ask(10), Tried()) is None
    assert p.missing() == role
