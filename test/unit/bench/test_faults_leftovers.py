"""Leftovers of an idle router, from its status and its descriptors."""

from __future__ import annotations

import os
import socket
from typing import Any

import psutil
import pytest
from faults.leftovers import IDLE_MOST, Descriptors, find_extra_descriptors, find_in_status

SERVER = {"url": "http://p0", "outstanding_requests": 0, "outstanding_tokens": 0}
TASK = {"name": "controller", "alive": True, "restarts": 0, "error": None}
REST: dict[str, Any] = {
    "in_flight": 0, "queued": 0, "prefill": [SERVER], "decode": [SERVER], "draining": [], "tasks": [TASK],
}  # fmt: skip


def test_idle_router_has_no_leftovers() -> None:
    assert list(find_in_status(REST)) == []


@pytest.mark.parametrize(
    ("what", "found"),
    [
        ({"in_flight": 2}, "2 requests in flight"),
        ({"queued": 1}, "1 requests queued"),
        ({"decode": [{**SERVER, "outstanding_requests": 1, "outstanding_tokens": 9}]}, "1 requests and 9 tokens at http://p0"),
        ({"draining": [{**SERVER, "outstanding_tokens": 9}]}, "0 requests and 9 tokens at http://p0"),
        ({"tasks": [{**TASK, "alive": False, "error": "E: x"}]}, "the task controller failed 0 times: E: x"),
        ({"tasks": [{**TASK, "restarts": 3, "error": "E: x"}]}, "the task controller failed 3 times: E: x"),
    ],
)  # fmt: skip
def test_each_leftover_is_named(what: dict[str, Any], found: str) -> None:
    assert list(find_in_status({**REST, **what})) == [found]


def test_process_descriptors_are_classified() -> None:
    process = psutil.Process()
    with socket.create_server(("127.0.0.1", 0)) as ours, socket.create_server(("127.0.0.1", 0)) as server:
        port, upstream = ours.getsockname()[1], server.getsockname()[1]
        before = Descriptors.count(process, port, [upstream])
        assert (before.clients, dict(before.upstream), before.broken) == (0, {}, 0)
        # The other ends also belong to this process, so they count as other descriptors.
        client = socket.create_connection(("127.0.0.1", port))
        accepted, _ = ours.accept()
        behind = socket.create_connection(("127.0.0.1", upstream))
        ending, _ = server.accept()
        with client, accepted, behind, ending, open(os.devnull):
            now = Descriptors.count(process, port, [upstream])
            assert (now.clients, dict(now.upstream)) == (1, {upstream: 1})
            assert now.others - before.others == 3
            assert list(find_extra_descriptors(now, before)) == [
                "1 connections of clients", "3 descriptors more than before the first request",
            ]  # fmt: skip
            ending.close()
            assert Descriptors.count(process, port, [upstream]).broken == 1
        assert Descriptors.count(process, port, [upstream]) == before


def test_limited_idle_server_connections_are_allowed() -> None:
    before = Descriptors(0, {}, 0, 12)
    assert list(find_extra_descriptors(Descriptors(0, {7: IDLE_MOST}, 0, 11), before)) == []
    assert list(find_extra_descriptors(Descriptors(0, {7: IDLE_MOST + 1}, 1, 12), before)) == [
        "1 connections that their servers have closed", f"{IDLE_MOST + 1} connections to the server at port 7",
    ]  # fmt: skip
