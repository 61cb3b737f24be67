"""The lean client against a server with known delays."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import statistics
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from benchmark.rig import fast, lengths

DELAY_S = 0.02


class Slow(asyncio.Protocol):
    """Answers each request after DELAY_S, in two pieces; the first ``bad`` ones with a 400."""

    seen: list[dict[str, Any]]
    bad = 0

    def connection_made(self, transport: Any) -> None:
        self.transport, self.buffer = transport, b""

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        head, _, body = self.buffer.partition(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        if len(body) < length:
            return
        self.seen.append(json.loads(body[:length]))
        self.buffer = b""
        status = b"400 Bad Request" if len(self.seen) <= self.bad else b"200 OK"
        self.transport.write(b"HTTP/1.1 " + status + b"\r\ncontent-le")
        asyncio.get_running_loop().call_later(DELAY_S, self.transport.write, b"ngth: 2\r\n\r\n{}")


def against(bad: int, load: Callable[[int], Coroutine[Any, Any, Any]]) -> tuple[Any, list[dict[str, Any]]]:
    """Run ``load(port)`` against a Slow server: its result, and the bodies seen."""

    class Server(Slow):
        seen: list[dict[str, Any]] = []  # noqa: RUF012

    Server.bad = bad

    async def run() -> Any:
        server = await asyncio.get_running_loop().create_server(Server, "127.0.0.1", 0)
        async with server:
            return await load(server.sockets[0].getsockname()[1])

    return asyncio.run(run()), Server.seen


def bodies(n: int) -> list[bytes]:
    rng = random.Random(5)
    return [fast.prefill(7, rng) for _ in range(n)]


def test_times_are_those_of_the_server() -> None:
    times, seen = against(0, lambda port: fast.one_by_one(port, bodies(9)))
    assert statistics.median(times) == pytest.approx(DELAY_S, rel=0.5)
    assert min(times) >= DELAY_S
    assert [len(b["input_ids"]) for b in seen] == [7] * 9
    assert len({b["bootstrap_room"] for b in seen}) == 9


def test_a_closed_loop_keeps_every_client_busy_and_counts_answers_only() -> None:
    loop, seen = against(0, lambda port: fast.closed_loop(port, itertools.cycle(bodies(3)), 4, 0.5, 0.1))
    assert loop.failed == 0
    assert loop.rate == pytest.approx(4 / DELAY_S, rel=0.5)
    assert len(loop.ttft_s) < len(seen)


def test_an_open_loop_does_not_wait_for_answers() -> None:
    rng = random.Random(6)
    arrivals = [fast.Arrival(0.001 * i, "ab"[i % 2], fast.prefill(3, rng, 50.0)) for i in range(10)]
    seen, got = against(0, lambda port: fast.open_loop(port, arrivals))
    assert [kind for kind, _ in seen] == list("ab" * 5)
    assert all(ttft is not None and ttft < 5 * DELAY_S for _, ttft in seen)
    assert got[0]["sampling_params"]["custom_params"] == {"ttft_slo_ms": 50.0}


def test_a_connection_the_server_has_closed_is_not_used_again() -> None:
    class Once(Slow):
        seen: list[dict[str, Any]] = []  # noqa: RUF012

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            asyncio.get_running_loop().call_later(2 * DELAY_S, self.transport.close)

    async def run() -> Any:
        server = await asyncio.get_running_loop().create_server(Once, "127.0.0.1", 0)
        async with server:
            arrivals = [fast.Arrival(0.1 * i, "a", raw) for i, raw in enumerate(bodies(3))]
            return await fast.open_loop(server.sockets[0].getsockname()[1], arrivals)

    assert all(ttft is not None for _, ttft in asyncio.run(run()))


def test_failures_are_told() -> None:
    rng = random.Random(6)
    arrivals = [fast.Arrival(0.05 * i, "a", fast.prefill(3, rng)) for i in range(2)]
    seen, _ = against(1, lambda port: fast.open_loop(port, arrivals))
    assert seen[0] == ("a", None)
    assert seen[1][1] is not None
    with pytest.raises(ConnectionError):
        against(1, lambda port: fast.one_by_one(port, bodies(1)))
    loop, _ = against(1, lambda port: fast.closed_loop(port, itertools.cycle(bodies(1)), 1, 0.1, 0.0))
    assert loop.failed == 1


def test_the_same_seed_gives_the_same_requests() -> None:
    assert bodies(5) == bodies(5)


def test_lengths_come_from_the_trace_and_have_a_stand_in(tmp_path: Any) -> None:
    real, source = lengths.short(1000, random.Random(1))
    assert "lmsys" in source
    made, other = lengths.short(1000, random.Random(1), trace=tmp_path / "none.csv.gz")
    assert "lognormal" in other
    for some in (real, made):
        assert min(some) >= 1
        assert max(some) <= 256
        assert 10 <= statistics.median(some) <= 40
