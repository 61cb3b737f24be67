"""A named session stays at the server that served it, unless that server is gone or far behind."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

pytest.importorskip("sglang_router")

from choosing import choose_and_record
from laps_core.latency.step import Coefficients
from laps_core.pools import sessions
from laps_core.pools.choice import Choice, Pools
from laps_core.pools.config import AllocConfig
from laps_core.pools.prefixes import Ask, fingerprint
from sglang_router_laps.request.body import SESSION_LONGEST, read_session

MODEL = Coefficients(alpha=0.0, linear=1e-4, gamma_r=0.0, per_request=0.0, fixed=0.01)
TEXT = b"".join(b"%08d" % i for i in range(1024))


def servers(n: int) -> Pools:
    made = Pools([(f"http://p{i}:1", 1) for i in range(n)], AllocConfig(), lambda: 100.0, fixed=False)
    for instance in made.instances:
        instance.set_capabilities(True, MODEL, None)
    return made


def chosen(p: Pools, ask: Ask) -> Choice:
    found = choose_and_record(p, ask)
    assert found is not None
    return found


def test_session_stays_although_another_server_caches_prompt() -> None:
    p = servers(3)
    first = chosen(p, Ask(1000, session="a"))
    assert first.why == "expected"
    other = next(i for i in p.instances if i is not first.instance)
    other.prefixes.add(fingerprint(TEXT))
    ask = Ask(2048, [fingerprint(TEXT)])
    assert chosen(p, ask).why == "prefix"
    named = Ask(2048, [fingerprint(TEXT)], session="a")
    found = chosen(p, named)
    assert (found.instance, found.why) == (first.instance, "session")


def test_session_leaves_server_that_is_gone_or_far_behind() -> None:
    p = servers(2)
    first = chosen(p, Ask(1000, session="a")).instance
    (second,) = [i for i in p.instances if i is not first]
    with first.lease(1000, "long", 0.05):
        assert chosen(p, Ask(1000, session="a")).instance is first, "a little behind"
    leases = [first.lease(50_000, "long", 5.0) for _ in range(3)]
    for lease in leases:
        lease.__enter__()
    found = chosen(p, Ask(1000, session="a"))
    assert (found.instance, found.why) == (second, "expected"), "far behind"
    for lease in leases:
        lease.end()
    assert chosen(p, Ask(1000, session="a")).instance is second, "where it has gone it stays"
    p.leave(second)
    assert chosen(p, Ask(1000, session="a")).instance is first
    p.forget_prefixes()
    assert chosen(p, Ask(1000, session="a")).why == "expected"


def test_session_avoids_server_that_failed_request() -> None:
    p = servers(2)
    first = chosen(p, Ask(1000, session="a")).instance
    found = choose_and_record(p, Ask(1000, session="a"), [first])
    assert found is not None
    assert found.instance is not first


def test_number_of_remembered_sessions_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MOST", 10)
    p, table = servers(2), sessions.SessionTable()
    for i in range(30):
        table.served(str(i), p.instances[0])
    table.served(None, p.instances[0])
    assert len(table) == 10
    assert table.holder(Ask(1, session="3"), p.instances, 100.0, 256) is None
    assert table.holder(Ask(1, session="29"), p.instances, 100.0, 256) is p.instances[0]


@pytest.mark.parametrize(
    ("headers", "body", "name"),
    [
        ({"x-smg-routing-key": "k", "x-session-id": "s"}, {"session_params": {"session_id": "b"}}, "k"),
        ({"x-session-id": "s"}, {"session_params": {"session_id": "b"}}, "s"),
        ({}, {"session_params": {"session_id": "b"}}, "b"),
        ({}, {"session_params": {"session_id": 7}}, None),
        ({}, {"session_params": ["b"]}, None),
        ({}, {}, None),
        ({"x-session-id": ""}, {}, None),
        ({"x-session-id": "x" * (SESSION_LONGEST + 1)}, {}, None),
    ],
)
def test_session_name_is_read_from_headers_then_body(
    headers: dict[str, str], body: dict[str, object], name: str | None
) -> None:
    assert read_session(headers, body) == name


def test_session_turn_at_threshold_waits_only_for_short_work() -> None:
    p = servers(2)
    first, second = p.instances
    with first.lease(50_000, "long", 5.0), second.lease(50_000, "long", 5.0):
        for why in ("expected", "session"):
            found = chosen(p, Ask(256, session="a"))
            assert (found.instance, found.why) == (first, why), "long work is preempted here as there"
        with ExitStack() as leases:
            for _ in range(25):
                leases.enter_context(first.lease(200, "short", 0.02))
            assert chosen(p, Ask(256, session="a")).instance is second, "short work is not"


def test_session_counts_time_of_cached_prefix_once() -> None:
    p = servers(2)
    for instance in p.instances:
        instance.set_capabilities(
            True, Coefficients(alpha=0.0, linear=1e-4, gamma_r=2e-4, per_request=0.0, fixed=0.01), None
        )
    first = chosen(p, Ask(1024, [fingerprint(TEXT[:4096])], session="a"))
    found = chosen(p, Ask(2048, [fingerprint(TEXT)], session="a"))
    assert (found.instance, found.why, found.cached) == (first.instance, "session", 1024)


@pytest.mark.parametrize("ranks", [1, 4])
def test_server_that_left_keeps_no_prefixes_for_its_session(ranks: int) -> None:
    p = servers(1)
    (gone,) = p.instances
    gone.set_rank_count(ranks)
    place = chosen(p, Ask(2048, [fingerprint(TEXT)], session="a")).place
    assert len(place.prefixes) == 32
    p.leave(gone)
    assert len(place.prefixes) == gone.prefix_blocks == 0
