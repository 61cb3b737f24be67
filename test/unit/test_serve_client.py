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


def run_against_server(
    load: Callable[[Target], Coroutine[Any, Any, Any]], closes: bool = False
) -> tuple[Any, list[int]]:
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
    return run_against_server(lambda target: client.replay(target, jobs, bodies(jobs), patience_s), closes)


def test_ttft_matches_server_delay() -> None:
    jobs = [Job(0.01 * i, tokens) for i, tokens in enumerate((20, 200, 50, 100))]
    answers, _ = replay(jobs)
    assert [a.job for a in answers] == jobs
    for answer in answers:
        assert answer.ttft_s is not None
        assert PER_TOKEN_S * answer.job.new - 0.002 <= answer.ttft_s < PER_TOKEN_S * answer.job.new + BUSY_S


def test_jobs_are_sent_on_schedule_regardless_of_answers() -> None:
    jobs = [Job(0.02 * i, 300) for i in range(5)]
    answers, _ = replay(jobs)
    for answer in answers:
        assert -0.002 <= answer.sent_s - answer.job.at_s < BUSY_S
        assert answer.late_s >= 0.0
    assert answers[-1].sent_s < (answers[0].ttft_s or 0.0)


def test_follow_up_turn_waits_for_previous_answer() -> None:
    jobs = [Job(0.0, 200), Job(0.01, 20, 200, after=0), Job(0.02, 21)]
    answers, order = replay(jobs)
    assert order == [200, 21, 20]
    assert answers[1].sent_s >= 0.2
    assert answers[1].late_s < BUSY_S


def test_error_response_has_no_ttft() -> None:
    answers, _ = replay([Job(0.0, 13), Job(0.0, 20)])
    assert [a.ttft_s is None for a in answers] == [True, False]


def test_closed_connection_fails_requests() -> None:
    answers, _ = replay([Job(0.0, 20), Job(0.0, 21)], closes=True)
    assert [a.ttft_s for a in answers] == [None, None]


def test_replay_gives_up_after_patience() -> None:
    answers, _ = replay([Job(0.0, 4000), Job(0.0, 10)], patience_s=0.5)
    assert [a.ttft_s is None for a in answers] == [True, False]


def test_refused_connection_has_no_ttft() -> None:
    jobs = [Job(0.0, 20)]
    answers = asyncio.run(client.replay(Target("127.0.0.1", 9), jobs, bodies(jobs), 1.0))
    assert answers[0].ttft_s is None


def test_closed_loop_keeps_clients_busy() -> None:
    jobs = [Job(0.0, 50)] * 3
    loop, _ = run_against_server(lambda target: client.closed(target, bodies(jobs), 4, 1.0, 0.1))
    assert loop.failed == 0
    assert 4 / (0.05 + BUSY_S) < loop.steady.requests_per_s < 1.1 * 4 / 0.05
    assert 0.048 < statistics.median(loop.ttft_s) < 0.05 + BUSY_S


def test_closed_loop_reruns_longer_while_littles_law_fails() -> None:
    jobs = [Job(0.0, 900), *([Job(0.0, 20)] * 2000)]
    loop, lengths = run_against_server(lambda target: asyncio.to_thread(closed_loop, target, bodies(jobs), 4, 0.4, 0.1))
    assert loop.end_s - loop.begin_s >= 0.8 - 1e-6
    assert lengths.count(900) == 1
    assert loop.steady.holds


def test_every_block_of_closed_loop_has_same_mix() -> None:
    jobs = in_blocks(named.make("lmsys", named.Scale(4096, 4096)), random.Random(1))
    blocks = [[job.new for job in jobs[i : i + BLOCK]] for i in range(0, len(jobs), BLOCK)]
    assert len(blocks) == BLOCKS
    assert all(sorted(block) == sorted(blocks[0]) for block in blocks)
    assert blocks[0] != blocks[1]
    assert len({*blocks[0]}) > BLOCK // 4


def test_answered_loop_sends_each_prompt_once_and_awaits_all() -> None:
    jobs = [Job(0.0, 20 + i) for i in range(10)] + [Job(0.0, 400)]
    loop, lengths = run_against_server(
        lambda target: asyncio.to_thread(
            answered_loop, target, bodies(jobs), 3, math.inf, 0.0, [job.new for job in jobs]
        )
    )
    assert sorted(lengths) == [job.new for job in jobs]
    assert sorted(a.tokens for a in loop.counted) == [job.new for job in jobs]
    assert loop.end_s - loop.begin_s > 0.4
    assert loop.steady.littles_ratio == pytest.approx(1.0, abs=0.05)
    with pytest.raises(ConnectionError, match=r"requests to http://.* failed in a loop of 2 clients"):
        run_against_server(
            lambda target: asyncio.to_thread(answered_loop, target, bodies([Job(0.0, 13)] * 3), 2, math.inf, 0.0, [13])
        )


def test_closed_loop_waits_for_all_requests_sent_during_loop() -> None:
    # One prompt in eight takes 0.8 s, twice the counted time.
    jobs = [Job(0.0, 800 if i % 8 == 0 else 10) for i in range(64)]
    new = [job.new for job in jobs]
    loop, _ = run_against_server(lambda target: client.closed(target, bodies(jobs), 4, 0.4, 0.0, new))
    answered = [a for a in loop.asked if a.sent_s + a.took_s < loop.end_s]
    missed = len(answered) / 0.4 * statistics.fmean(a.took_s for a in answered)
    assert missed < 0.8 * 4, "the answers of that time do not add up to four clients"
    found = loop.steady.require("server")
    assert any(a.tokens == 800 for a in loop.counted)
    assert found.mean_ttft_s * found.requests_per_s == pytest.approx(4.0, rel=0.05)
    assert found.tokens_per_s["long"] > found.tokens_per_s["short"] > 0.0


def test_one_by_one_raises_on_failed_request() -> None:
    with pytest.raises(ConnectionError, match=r"a request to http://127.0.0.1:\d+ failed"):
        run_against_server(lambda target: client.one_by_one(target, bodies([Job(0.0, 13)])))


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


def test_stream_ttft_is_time_of_first_event() -> None:
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


def test_connection_closed_by_server_is_not_reused() -> None:
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

    assert [a.ttft_s is not None for a in asyncio.run(run())] == [True] * 3


def test_closed_loop_client_stops_after_failure() -> None:
    loop, lengths = run_against_server(lambda target: client.closed(target, bodies([Job(0.0, 13)]), 3, 1.0, 0.0))
    assert (loop.failed, len(lengths), loop.ttft_s) == (3, 3, [])


def test_job_deadline_is_sent_as_custom_param() -> None:
    told, plain = (json.loads(raw.partition(b"\r\n\r\n")[2]) for raw in bodies([Job(0.0, 3, slo_s=0.05), Job(0.0, 3)]))
    assert told["sampling_params"]["custom_params"] == {"ttft_slo_ms": 50.0}
    assert "custom_params" not in plain["sampling_params"]
    assert told["bootstrap_room"] != plain["bootstrap_room"]
