"""Small parts of the router alone: retries, events, errors, and attribution of a failure to a server."""

from __future__ import annotations

import errno
import resource
import ssl

import aiohttp
import orjson
import pytest
from aiohttp.client_reqrep import ConnectionKey
from laps_core.pools.instances import Instance
from sglang_router.router_args import RouterArgs
from sglang_router_laps.balancer import share_descriptors
from sglang_router_laps.request.passage import SAVED_MAX, Retries
from sglang_router_laps.request.replies import fault
from sglang_router_laps.request.streams import Events, MergedEvents
from sglang_router_laps.servers.upstream import failure

KEY = ConnectionKey("h", 1, False, True, None, None, None)


def test_retry_backoff_grows_to_maximum() -> None:
    retries = Retries(
        RouterArgs(
            retry_initial_backoff_ms=50,
            retry_max_backoff_ms=1000,
            retry_backoff_multiplier=2.0,
            retry_jitter_factor=0.0,
        )
    )
    assert [retries.pause_s(i) for i in (0, 1, 2, 5, 10**9)] == [0.05, 0.1, 0.2, 1.0, 1.0]
    jittered = Retries(RouterArgs(retry_jitter_factor=5.0))
    assert all(jittered.pause_s(0) >= 0 for _ in range(100))


def test_retry_budget_is_share_of_requests() -> None:
    retries = Retries(RouterArgs())
    spent = 0
    for _ in range(1000):
        retries.earn()
        spent += retries.spend()
    assert SAVED_MAX <= spent <= SAVED_MAX + 0.2 * 1000 + 1


@pytest.mark.parametrize("line", [b"\n", b"\r\n"])
@pytest.mark.parametrize("size", range(1, 12))
def test_sse_events_stay_whole_for_any_split(size: int, line: bytes) -> None:
    text = b'data: {"a": 1}\n\ndata: {"b": 2}\n\n\n\ndata: [DONE]\n\nda'.replace(b"\n", line)
    events = Events()
    out = [events.feed(text[i : i + size]) for i in range(0, len(text), size)]
    assert all(not part or part.endswith(line * 2) for part in out)
    # The first event is passed on before the last one arrives.
    assert any(out[: len(out) // 2])
    assert b"".join(out) == text[:-2]
    assert events.flush() == b"da"


@pytest.mark.parametrize("size", range(1, 12))
def test_logprobs_are_merged_into_events_for_any_split(size: int) -> None:
    def event(*logprobs: int) -> bytes:
        return b"data: " + orjson.dumps({"meta_info": {"input_token_logprobs": logprobs}}) + b"\n\n"

    text = event(2) + event(3) + b"data: [DONE]\n\nda"
    events = MergedEvents(event(1))
    out = [part for i in range(0, len(text), size) for part in events.parts(text[i : i + size])]
    assert out == [event(1, 2), event(1, 3), b"data: [DONE]\n\n"]
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
        (b'{"meta_info": {"finish_reason": {"type": "abort"}}}', 499),
        (b'{"choices": [{"finish_reason": "abort"}]}', 499),
        (b'"error"', None),
        (b'[1, "error"]', None),
        (b'{"meta_info": 7, "choices": {"abort": 1}, "x": "abort"}', None),
    ],
)
def test_errors_inside_replies_are_found(reply: bytes, status: int | None) -> None:
    found = fault(reply)
    assert (found and found.status) == status
    if found:
        assert orjson.loads(found.body)["error"]


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
        (connecting(errno.EMFILE), "exhausted"),
        (connecting(errno.ENFILE), "exhausted"),
        (connecting(errno.ENOBUFS), "exhausted"),
        (connecting(errno.EADDRNOTAVAIL), "local"),
        (connecting(errno.ENETUNREACH), "local"),
        (aiohttp.ClientConnectorDNSError(KEY, OSError(-2, "Name or service not known")), "local"),
        (aiohttp.ClientConnectorSSLError(KEY, ssl.SSLError(1, "wrong version number")), "local"),
        (aiohttp.ClientConnectorCertificateError(KEY, ssl.CertificateError("expired")), "local"),
    ],
)
def test_connection_failure_is_classified_by_cause(cause: Exception, means: str) -> None:
    found = failure(Instance("http://h:1", "decode", lambda: 0.0), cause)
    assert found.kind == means
    assert found.blameless == (means in ("local", "exhausted"))


def test_descriptor_limit_bounds_requests_and_queue() -> None:
    few, many = (share_descriptors(n, 4, 1 << 30, 0)[0] for n in (200, 100_000))
    assert 1 <= few < 60
    assert many > 30_000
    assert share_descriptors(10, 100, 8192, 100)[:2] == (1, 0)
    assert share_descriptors(resource.RLIM_INFINITY, 4, 8192, 100)[:2] == (8192, 100)


@pytest.mark.parametrize(
    ("limit", "requests", "queued"), [(40_000, 8192, 30_000), (1024, 8192, 100), (9000, 200, 9000)]
)
def test_requests_and_queue_use_most_of_descriptor_limit(limit: int, requests: int, queued: int) -> None:
    """A long queue shrinks even if there are descriptors for all requests."""
    allowed, waiting, clients = share_descriptors(limit, 4, requests, queued)
    assert 0 < allowed <= requests
    assert 0 < waiting <= queued
    assert 0.9 * limit - 100 < 3 * allowed + waiting < limit
    assert allowed + waiting <= clients < limit - 2 * allowed
