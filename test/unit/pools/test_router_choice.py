"""Predicted work and delay of a request at the chosen server, and the pool that a new server joins."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
from choosing import choose_and_record
from laps_core.latency.step import Coefficients
from laps_core.pools.choice import Choice, Pools
from laps_core.pools.config import AllocConfig
from laps_core.pools.prefixes import Ask, fingerprint
from laps_core.protocol import Assignment

NOW_S = 100.0
MODEL = Coefficients(alpha=0.0, linear=1e-4, gamma_r=1e-5, per_request=0.0, fixed=0.01)
TEXT = b"".join(b"%08d" % i for i in range(1024))
HALF = TEXT[:4096]
"""First half of the text: 16 of 32 blocks."""


def servers(n: int, pools: str = "", **config: Any) -> Pools:
    """Return LAPS servers: undivided, or with a letter for the pool of each server."""
    made = Pools([(f"http://p{i}:1", 1) for i in range(n)], AllocConfig(**config), lambda: NOW_S, fixed=False)
    names: dict[str, Assignment] = {"s": "short", "l": "long", "b": "both"}
    for instance, letter in zip(made.instances, pools or "b" * n, strict=True):
        instance.set_capabilities(True, MODEL, None)
        instance.pool = names[letter]
    return made


def chosen(p: Pools, ask: Ask) -> Choice:
    found = choose_and_record(p, ask)
    assert found is not None
    return found


def test_predicted_work_counts_new_and_cached_tokens() -> None:
    p = servers(1)
    chosen(p, Ask(1024, [fingerprint(HALF)]))
    found = chosen(p, Ask(2048, [fingerprint(TEXT)], refuse_at=NOW_S))
    assert (found.new_tokens, found.cached) == (1024, 1024)
    assert found.work_s == pytest.approx(0.1024 + 0.01024)
    assert found.late_s == pytest.approx(0.01 + 0.1024 + 0.01024)


def test_choice_counts_time_to_read_cached_tokens() -> None:
    """With half of the prompt cached the work takes 0.113 s, elsewhere 0.205 s; longer requests wait for this work."""
    p = servers(2)
    home = chosen(p, Ask(1024, [fingerprint(HALF)])).instance
    for waiting, stays in ((3, True), (4, False)):
        with ExitStack() as leases:
            for _ in range(waiting):
                leases.enter_context(home.lease(1, "long", 0.2))
            ask = Ask(2048, [fingerprint(TEXT)], refuse_at=NOW_S)
            assert (chosen(p, ask).instance is home) == stays


def test_late_s_is_predicted_time_past_deadline() -> None:
    p = servers(1)
    assert chosen(p, Ask(1000, refuse_at=NOW_S + 0.05)).late_s == pytest.approx(0.06)
    assert chosen(p, Ask(1000, refuse_at=NOW_S + 0.12)).late_s == 0.0
    with p.instances[0].lease(50_000, "long", 5.0):
        assert chosen(p, Ask(100, refuse_at=NOW_S)).late_s == pytest.approx(0.03), (
            "the slice that runs, and its own step"
        )
        assert chosen(p, Ask(1000, refuse_at=NOW_S)).late_s == pytest.approx(0.01 + 0.11), "the longer prompt waits"
        assert chosen(p, Ask(60_000, refuse_at=NOW_S)).late_s == pytest.approx(5.0 + 0.01 + 6.01)
    p.instances[0].set_capabilities(False, None, None)
    assert chosen(p, Ask(1000, refuse_at=NOW_S)).late_s == 0.0, "nobody knows"


def test_late_request_leaves_no_prefix_at_server() -> None:
    p = servers(1)
    chosen(p, Ask(1024, [fingerprint(HALF)], refuse_at=NOW_S))
    assert p.instances[0].prefix_blocks == 0


def test_prompt_of_exactly_longest_length_fits_server() -> None:
    p = servers(2)
    small, large = p.instances
    small.longest = 5000
    with large.lease(9000, "long", 1.0):
        assert chosen(p, Ask(5000)).instance is small
        assert chosen(p, Ask(5001)).instance is large


def test_short_prompt_without_prefix_stays_in_busy_short_pool() -> None:
    p = servers(2, "sl")
    with p.instances[0].lease(2048, "short", 0.2):
        assert chosen(p, Ask(256)).instance is p.instances[0]


@pytest.mark.parametrize(("outstanding", "copies"), [(2048, True), (2049, False)])
def test_prefix_is_copied_only_without_short_pool_overload(outstanding: int, copies: bool) -> None:
    p = servers(2, "sl")
    with p.instances[0].lease(outstanding, "short", 0.2):
        made = [chosen(p, Ask(1100, [fingerprint(HALF + b"%08d" % i * 40)])).why == "copy" for i in range(5)]
    assert any(made) == copies


def test_request_long_despite_prefix_does_not_count_as_sharer() -> None:
    p = servers(2, "sl")
    p.instances[0].healthy = False
    for i in range(6):
        # These requests are long even at the server with the prefix.
        assert chosen(p, Ask(2048, [fingerprint(HALF + b"%08d" % i * 512)])).length_class == "long"
    p.instances[0].healthy = True
    made = [chosen(p, Ask(1100, [fingerprint(HALF + b"%07dx" % i * 40)])).why == "copy" for i in range(3)]
    assert made == [False, False, True]


def test_by_url_finds_each_server() -> None:
    p = servers(3)
    assert [p.by_url(i.url) for i in p.instances] == p.instances


@pytest.mark.parametrize(
    ("pools", "place"),
    [
        ("bb", "both"),
        ("sl", "long"),
        ("ssl", "long"),
        ("sll", "short"),
        ("ll", "short"),
        ("ss", "long"),
        ("bsl", "both"),
    ],
)
def test_new_server_joins_smaller_pool(pools: str, place: str) -> None:
    p = servers(len(pools), pools)
    assert p.choose_pool() == place
    for i in p.instances:
        i.served = 1
    assert p.choose_pool() == place


def test_first_server_joins_both_pools_unless_initial_short_set() -> None:
    assert servers(0).choose_pool() == "both"
    assert servers(0, initial_short=1).choose_pool() == "short"


@pytest.mark.parametrize(("served", "place"), [(0, "long"), (1, "short")])
def test_choose_pool_counts_unused_servers_but_not_failed_ones(served: int, place: str) -> None:
    p = servers(4, "ssll")
    p.instances[0].healthy, p.instances[0].served = False, served
    assert p.choose_pool() == place


def test_repeated_choose_returns_equal_choice() -> None:
    p = servers(3, "sll")
    shared = [Ask(1100, [fingerprint(TEXT[:4096] + bytes([65 + k]) * 300)], session=str(k)) for k in range(4)]
    for ask in shared[:3]:
        chosen(p, ask)
    first = p.choose(shared[3])
    assert first is not None
    assert first.why == "copy"
    assert all(p.choose(shared[3]) == first for _ in range(5))


def test_hung_server_gets_no_more_of_burst_than_others() -> None:
    """A server without LAPS has one request of 0.2 s, unanswered for 20 s."""
    now_s = [NOW_S]
    p = Pools([(f"http://p{i}:1", 1) for i in range(3)], AllocConfig(), lambda: now_s[0])
    hung = p.instances[0]
    sent = [hung.lease(2000, "long", 0.2)]
    sent[0].__enter__()
    now_s[0] += 20.0
    for _ in range(60):
        sent.append(chosen(p, Ask(2000)).lease())
        sent[-1].__enter__()
    assert sum(lease.instance is hung for lease in sent) <= 21
