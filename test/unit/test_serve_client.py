"""Client of the benchmark, on a server with known delays."""

from __future__ import annotations

import asyncio
import json
import math
import random
import statistics
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from laps_plan.traffic import named
from laps_plan.traffic.job import Job

from benchmark.load import client
from benchmark.load.connection import Target
from benchmark.load.prompts import Prompts
from benchmark.serve.compare import BLOCK, BLOCKS, answered_loop, closed_loop, in_blocks

PER_TOKEN_S = 0.001
BUSY_S = 1.0
"""Tolerated delay (seconds) of observations while other processes use the cores."""


class Slow(asyncio.Protocol):
    """Server that answers after PER_TOKEN_S per prompt token, in two pieces; a prompt of 13 tokens gets a 500."""

    lengths: list[int]
    closes = False

    def connection_made(self, transport: Any) -> None:
        self.transport, self.buffer = transport, b""

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        head, _, body = self.buffer.partition(b"\r\n\r\n")
        if len(body) < int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0]):
            return
        self.buffer = b""
        tokens = len(json.loads(body)["input_ids"])
        self.lengths.append(tokens)
        asyncio.get_running_loop().call_later(PER_TOKEN_S * tokens, self.answer, tokens)

    def answer(self, tokens: int) -> None:
        if self.closes:
            self.transport.close()
            return
        status = b"500 Oh" if tokens == 13 else b"200 OK"
        self.transport.write(b"HTTP/1.1 " + status + b"\r\ncontent-le")
        asyncio.get_running_loop().call_soon(self.transport.write, b"ngth: 2\r\n\r\n{}")


def against(load: Callable[[Target], Coroutine[Any, Any, Any]], closes: bool = False) -> tuple[Any, list[int]]:
    """Run ``load`` against a Slow server. Return its result, and the prompt lengths in order."""

    class Server(Slow):
        lengths: list[int] = []  # noqa: RUF012

    Server.closes = closes

    async def run() -> Any:
        server = await asyncio.get_running_loop().create_server(Server, "127.0.0.1", 0)
        async with server:
            return await load(Target("127.0.0.1", server.sockets[0].getsockname()[1]))

    return asyncio.run(run()), Server.lengths


def bodies(jobs: list[Job]) -> list[bytes]:
    return Prompts((3, 100), 1, 4096, reuse=False, prefill_only=True).bodies(jobs, 1)


def replay(jobs: list[Job], patience_s: float = 5.0, closes: bool = False) -> tuple[list[client.Answer], list[int]]:
    return against(lambda target: client.replay(target, jobs, bodies(jobs), patience_s), closes)


def test_ttft_is_the_servers_delay() -> None:
    jobs = [Job(0.01 * i, tokens) for i, tokens in enumerate((20, 200, 50, 100))]
    answers, _ = replay(jobs)
    assert [a.job for a in answers] == jobs
    for answer in answers:
        assert answer.ttft_s is not None
        assert PER_TOKEN_S * answer.job.new - 0.002 <= answer.ttft_s < PER_TOKEN_S * answer.job.new + BUSY_S


def test_jobs_are_sent_when_due_whatever_has_come_back() -> None:
    jobs = [Job(0.02 * i, 300) for i in range(5)]
    answers, _ = replay(jobs)
    for answer in answers:
        assert -0.002 <= answer.sent_s - answer.job.at_s < BUSY_S
        assert answer.late_s >= 0.0
    assert answers[-1].sent_s < (answers[0].ttft_s or 0.0)


def test_a_turn_is_not_sent_before_the_answer_it_needs() -> None:
    jobs = [Job(0.0, 200), Job(0.01, 20, 200, after=0), Job(0.02, 21)]
    answers, order = replay(jobs)
    assert order == [200, 21, 20]
    assert answers[1].sent_s >= 0.2
    assert answers[1].late_s < BUSY_S


def test_failures_are_failures() -> None:
    answers, _ = replay([Job(0.0, 13), Job(0.0, 20)])
    assert [a.ttft_s is None for a in answers] == [True, False]


def test_a_server_that_hangs_up_fails_its_requests() -> None:
    answers, _ = replay([Job(0.0, 20), Job(0.0, 21)], closes=True)
    assert [a.ttft_s for a in answers] == [None, None]


def test_patience_ends() -> None:
    answers, _ = replay([Job(0.0, 4000), Job(0.0, 10)], patience_s=0.5)
    assert [a.ttft_s is None for a in answers] == [True, False]


def test_nobody_there() -> None:
    jobs = [Job(0.0, 20)]
    answers = asyncio.run(client.replay(Target("127.0.0.1", 9), jobs, bodies(jobs), 1.0))
    assert answers[0].ttft_s is None


def test_a_closed_loop_keeps_its_clients_busy() -> None:
    jobs = [Job(0.0, 50)] * 3
    loop, _ = against(lambda target: client.closed(target, bodies(jobs), 4, 1.0, 0.1))
    assert loop.failed == 0
    assert 4 / (0.05 + BUSY_S) < loop.steady.requests_per_s < 1.1 * 4 / 0.05
    assert 0.048 < statistics.median(loop.ttft_s) < 0.05 + BUSY_S


def test_a_closed_loop_in_which_somebody_waited_all_the_time_is_run_again_for_longer() -> None:
    jobs = [Job(0.0, 900), *([Job(0.0, 20)] * 2000)]
    loop, lengths = against(lambda target: asyncio.to_thread(closed_loop, target, bodies(jobs), 4, 0.4, 0.1))
    assert loop.end_s - loop.begin_s >= 0.8 - 1e-6
    assert lengths.count(900) == 1
    assert loop.steady.holds


def test_any_stretch_of_a_closed_loop_has_the_mix_that_was_asked() -> None:
    jobs = in_blocks(named.make("lmsys", named.Scale(4096, 4096)), random.Random(1))
    blocks = [[job.new for job in jobs[i : i + BLOCK]] for i in range(0, len(jobs), BLOCK)]
    assert len(blocks) == BLOCKS
    assert all(sorted(block) == sorted(blocks[0]) for block in blocks)
    assert blocks[0] != blocks[1]
    assert len({*blocks[0]}) > BLOCK // 4


def test_fixed_work_is_asked_once_and_answered_to_the_last_request() -> None:
    jobs = [Job(0.0, 20 + i) for i in range(10)] + [Job(0.0, 400)]
    loop, lengths = against(
        lambda target: asyncio.to_thread(
            answered_loop, target, bodies(jobs), 3, math.inf, 0.0, [job.new for job in jobs]
        )
    )
    assert sorted(lengths) == [job.new for job in jobs]
    assert sorted(a.tokens for a in loop.counted) == [job.new for job in jobs]
    assert loop.end_s - loop.begin_s > 0.4
    assert loop.steady.littles_ratio == pytest.approx(1.0, abs=0.05)
    with pytest.raises(ConnectionError, match=r"requests to http://.* failed in a loop of 2 clients"):
        against(
            lambda target: asyncio.to_thread(answered_loop, target, bodies([Job(0.0, 13)] * 3), 2, math.inf, 0.0, [13])
        )


def test_a_closed_loop_waits_for_what_was_asked_in_it() -> None:
    # One prompt in eight takes 0.8 s, twice the counted time.
    jobs = [Job(0.0, 800 if i % 8 == 0 else 10) for i in range(64)]
    new = [job.new for job in jobs]
    loop, _ = against(lambda target: client.closed(target, bodies(jobs), 4, 0.4, 0.0, new))
    answered = [a for a in loop.asked if a.sent_s + a.took_s < loop.end_s]
    missed = len(answered) / 0.4 * statistics.fmean(a.took_s for a in answered)
    assert missed < 0.8 * 4, "the answers of that time do not add up to four clients"
    found = loop.steady.require("server")
    assert any(a.tokens == 800 for a in loop.counted)
    assert found.mean_ttft_s * found.requests_per_s == pytest.approx(4.0, rel=0.05)
    assert found.tokens_per_s["long"] > found.tokens_per_s["short"] > 0.0


def test_one_by_one_tells_of_a_failure() -> None:
    with pytest.raises(ConnectionError, match=r"a request to http://127.0.0.1:\d+ failed"):
        against(lambda target: client.one_by_one(target, bodies([Job(0.0, 13)])))


FIRST = b'data: {"text":"error"}\n\n'
"""First event of an answer, whose text must not be mistaken for an error."""


class Streaming(asyncio.Protocol):
    """Server that streams two events, the second one late; a prompt of 13 tokens gets an error."""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        body = json.loads(data.partition(b"\r\n\r\n")[2])
        assert body["stream"] is True
        last = b'data: {"error": 1}\n\n' if len(body["input_ids"]) == 13 else b"data: [DONE]\n\n"
        self.transport.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        loop = asyncio.get_running_loop()
        loop.call_later(0.05, self.transport.write, b"%x\r\n%b\r\n" % (len(FIRST), FIRST))
        loop.call_later(0.3, self.transport.write, b"%x\r\n%b\r\n0\r\n\r\n" % (len(last), last))


def test_the_first_token_of_a_stream_is_its_first_event() -> None:
    prompts = Prompts((3, 100), 1, 4096, reuse=False, prefill_only=False, answer=4)
    jobs = [Job(0.0, 20), Job(0.0, 13)]

    async def run() -> tuple[list[client.Answer], client.Loop]:
        server = await asyncio.get_running_loop().create_server(Streaming, "127.0.0.1", 0)
        async with server:
            target = Target("127.0.0.1", server.sockets[0].getsockname()[1])
            answers = await client.replay(target, jobs, prompts.bodies(jobs, 1), 5.0)
            return answers, await client.closed(target, prompts.bodies(jobs[:1], 1), 1, 0.5, 0.0)

    (whole, failed), loop = asyncio.run(run())
    assert whole.ttft_s is not None
    assert 0.048 < whole.ttft_s < 0.05 + BUSY_S
    assert failed.ttft_s is None
    assert loop.ttft_s[0] < loop.whole_s[0] - 0.1


def test_a_connection_the_server_has_closed_is_not_used_again() -> None:
    class Once(Slow):
        lengths: list[int] = []  # noqa: RUF012

        def answer(self, tokens: int) -> None:
            super().answer(tokens)
            asyncio.get_running_loop().call_later(0.02, self.transport.close)

    async def run() -> list[client.Answer]:
        server = await asyncio.get_running_loop().create_server(Once, "127.0.0.1", 0)
        async with server:
            jobs = [Job(0.1 * i, 20) for i in range(3)]
            return await client.replay(Target("127.0.0.1", server.sockets[0].getsockname()[1]), jobs, bodies(jobs), 5.0)

    assert all(a.ttft_s is not None for a in asyncio.run(run()))


def test_a_client_whose_request_fails_is_gone() -> None:
    loop, lengths = against(lambda target: client.closed(target, bodies([Job(0.0, 13)]), 3, 1.0, 0.0))
    assert (loop.failed, len(lengths), loop.ttft_s) == (3, 3, [])


def test_a_job_tells_its_deadline() -> None:
    told, plain = (json.loads(raw.partition(b"\r\n\r\n")[2]) for raw in bodies([Job(0.0, 3, slo_s=0.05), Job(0.0, 3)]))
    assert told["sampling_params"]["custom_params"] == {"ttft_slo_ms": 50.0}
    assert "custom_params" not in plain["sampling_params"]
    assert told["bootstrap_room"] != plain["bootstrap_room"]
