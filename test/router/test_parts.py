"""Small parts of the router by themselves: breaker, retries, events, faults, and whose fault a failure is."""

from __future__ import annotations

import errno
import ssl
from typing import Any

import aiohttp
import orjson
import pytest
from aiohttp.client_reqrep import ConnectionKey
from sglang_router_laps.request.events import Events
from sglang_router_laps.request.faults import fault
from sglang_router_laps.request.retries import SAVED_MAX, RetryBudget, RetryConfig
from sglang_router_laps.servers import places
from sglang_router_laps.servers.breaker import Breaker, BreakerConfig
from sglang_router_laps.servers.instances import Instance
from sglang_router_laps.servers.upstream import Local, Lost, failure

KEY = ConnectionKey("h", 1, False, True, None, None, None)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def broken(**config: Any) -> tuple[Breaker, Clock]:
    clock = Clock()
    return Breaker(BreakerConfig(failures=3, successes=2, timeout_s=10, window_s=30, **config), clock), clock


def test_a_breaker_opens_tries_and_closes() -> None:
    b, clock = broken()
    for _ in range(3):
        assert b.admits()
        b.failed()
    assert (b.state, b.admits()) == ("open", False)
    clock.now = 9.9
    assert not b.admits()
    clock.now = 10.0
    assert (b.admits(), b.state) == (True, "half_open")
    assert b.enter()
    assert b.admits()
    assert b.enter()
    # As many on trial as successes are asked for, and no more.
    assert not b.admits()
    b.succeeded()
    b.leave()
    assert b.admits()
    b.succeeded()
    b.leave()
    assert (b.state, b.enter()) == ("closed", False)


def test_a_failure_on_trial_opens_it_again() -> None:
    b, clock = broken()
    for _ in range(3):
        b.failed()
    clock.now = 10.0
    assert b.admits()
    b.failed()
    assert b.state == "open"
    clock.now = 19.9
    assert not b.admits()
    clock.now = 20.0
    assert b.admits()


def test_successes_make_up_for_failures_and_old_failures_are_forgotten() -> None:
    b, clock = broken()
    for _ in range(20):
        b.failed()
        b.succeeded()
    assert b.state == "closed"
    b.failed()
    b.failed()
    clock.now = 31.0
    b.failed()
    assert b.state == "closed"
    # More failures than successes open it, although no two follow each other without a success near.
    for _ in range(4):
        b.failed()
        b.failed()
        b.succeeded()
    assert b.state == "open"


def test_a_breaker_that_is_off_stays_closed() -> None:
    b = Breaker(BreakerConfig(failures=0))
    for _ in range(1000):
        b.failed()
    assert b.admits()


def test_pauses_grow_to_their_maximum() -> None:
    config = RetryConfig(backoff_s=0.05, backoff_max_s=1.0, growth=2.0, jitter=0.0)
    assert [config.pause_s(i) for i in (0, 1, 2, 5, 10**9)] == [0.05, 0.1, 0.2, 1.0, 1.0]
    jittered = RetryConfig(jitter=5.0)
    assert all(jittered.pause_s(0) >= 0 for _ in range(100))


def test_the_budget_of_retries_is_a_share_of_the_requests() -> None:
    budget = RetryBudget()
    spent = 0
    for _ in range(1000):
        budget.earn()
        spent += budget.spend()
    assert SAVED_MAX <= spent <= SAVED_MAX + 0.2 * 1000 + 1


@pytest.mark.parametrize("size", range(1, 12))
def test_events_come_whole_whatever_the_pieces(size: int) -> None:
    text = b'data: {"a": 1}\n\ndata: {"b": 2}\n\n\n\ndata: [DONE]\n\nda'
    events = Events()
    out = [events.feed(text[i : i + size]) for i in range(0, len(text), size)]
    assert all(not part or part.endswith(b"\n\n") for part in out)
    assert b"".join(out) == text[:-2]
    assert events.flush() == b"da"


@pytest.mark.parametrize(
    ("reply", "status"),
    [
        (b'{"text": "x", "meta_info": {"finish_reason": {"type": "length"}}}', None),
        (b'{"text": "\\"error\\" and \\"abort\\" said"}', None),
        (b'data: {"error": null, "text": "x"}\n\ndata: [DONE]\n\n', None),
        (b'data: {"error": {"message": "m", "code": 400}}\n\ndata: [DONE]\n\n', 400),
        (b'data: {"text": "x"}\n\ndata: {"error": {"message": "m", "code": 503}}\n\n', 503),
        (b'{"error": "plain"}', 500),
        (b'{"error": {"code": true}}', 500),
        (b'{"error": {"code": 1e400}}', None),
        (b'{"error": {"code": 200}}', 500),
        (b'[{"text": "x"}, {"meta_info": {"finish_reason": {"type": "abort", "status_code": 503}}}]', 503),
        (b'{"meta_info": {"finish_reason": {"type": "abort"}}}', 500),
        (b'{"choices": [{"finish_reason": "abort"}]}', 500),
        (b'"error"', None),
        (b'[1, "error"]', None),
        (b'{"meta_info": 7, "choices": {"abort": 1}, "x": "abort"}', None),
    ],
)
def test_errors_inside_replies_are_found(reply: bytes, status: int | None) -> None:
    found = fault(reply)
    assert (found and found[0]) == status
    if found:
        assert orjson.loads(found[1])["error"]


def connecting(number: int | None) -> aiohttp.ClientConnectorError:
    return aiohttp.ClientConnectorError(KEY, OSError(number, "no"))


@pytest.mark.parametrize(
    ("cause", "means"),
    [
        (connecting(errno.ECONNREFUSED), "refused"),
        (connecting(errno.ECONNRESET), "refused"),
        (connecting(errno.EHOSTUNREACH), "unreachable"),
        (connecting(errno.ETIMEDOUT), "unreachable"),
        (connecting(None), "unreachable"),
        (aiohttp.ConnectionTimeoutError(), "unreachable"),
        (aiohttp.ServerDisconnectedError(), "lost"),
        (aiohttp.ClientOSError(errno.ECONNRESET, "reset"), "lost"),
        (aiohttp.ClientPayloadError(), "lost"),
        (ConnectionResetError(), "lost"),
        (connecting(errno.EMFILE), True),
        (connecting(errno.ENFILE), True),
        (connecting(errno.ENOBUFS), True),
        (connecting(errno.EADDRNOTAVAIL), False),
        (connecting(errno.ENETUNREACH), False),
        (aiohttp.ClientConnectorDNSError(KEY, OSError(-2, "Name or service not known")), False),
        (aiohttp.ClientConnectorSSLError(KEY, ssl.SSLError(1, "wrong version number")), False),
        (aiohttp.ClientConnectorCertificateError(KEY, ssl.CertificateError("expired")), False),
    ],
)
def test_only_a_refusal_or_a_reset_tells_of_a_dead_server(cause: Exception, means: str | bool) -> None:
    found = failure(Instance("http://h:1", "decode"), cause)
    if isinstance(means, str):
        assert isinstance(found, Lost)
        assert found.kind == means
    else:
        assert isinstance(found, Local)
        assert found.exhausted is means


def test_descriptors_are_shared_out() -> None:
    few, many = (places.requests_at_most(n, 4) for n in (200, 100_000))
    assert 1 <= few < 60
    assert many > 30_000
    assert places.requests_at_most(10, 100) == 1
