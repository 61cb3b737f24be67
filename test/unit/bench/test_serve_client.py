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
from rounds import repeat_until

from benchmark.load import client
from benchmark.load.connection import Target
from benchmark.load.prompts import Prompts
from benchmark.serve.compare import BLOCK, BLOCKS, answered_loop, closed_loop, in_blocks

PER_TOKEN_S = 0.001
BUSY_S = 1.0
"""Longest delay (seconds) of an observation in at least one of several tries: other processes use the cores."""


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

    def attempt(_i: int) -> bool:
        answers, _ = replay(jobs, patience_s=60.0)
        assert [a.job for a in answers] == jobs
        delays = [(a.ttft_s or 0.0) - PER_TOKEN_S * a.job.new for a in answers]
        assert min(delays) >= -0.002
        return max(delays) < BUSY_S

    repeat_until(attempt, "answers are in time")


def test_jobs_are_sent_on_schedule_regardless_of_answers() -> None:
    jobs = [Job(0.02 * i, 300) for i in range(5)]

    def attempt(_i: int) -> bool:
        answers, _ = replay(jobs)
        delays = [answer.sent_s - answer.job.at_s for answer in answers]
        assert min(delays) >= -0.002
        assert min(answer.late_s for answer in answers) >= 0.0
        return max(delays) < BUSY_S and answers[-1].sent_s < (answers[0].ttft_s or 0.0)

    repeat_until(attempt, "jobs are sent in time, the last one before the first answer")


def test_follow_up_turn_waits_for_previous_answer() -> None:
    jobs = [Job(0.0, 1000), Job(0.01, 20, 1000, after=0), Job(0.02, 21)]

    def attempt(_i: int) -> bool:
        answers, order = replay(jobs)
        assert order.index(1000) < order.index(20)
        assert answers[1].sent_s >= 1.0
        return order == [1000, 21, 20] and answers[1].late_s < BUSY_S

    repeat_until(attempt, "a job without a previous turn does not wait")


def test_error_response_has_no_ttft() -> None:
    answers, _ = replay([Job(0.0, 13), Job(0.0, 20)])
    assert [a.ttft_s is None for a in answers] == [True, False]


def test_closed_connection_fails_requests() -> None:
    answers, _ = replay([Job(0.0, 20), Job(0.0, 21)], closes=True)
    assert [a.ttft_s for a in answers] == [None, None]


def test_replay_gives_up_after_patience() -> None:
    answers, _ = replay([Job(0.0, 60_000), Job(0.0, 10)], patience_s=3.0)
    assert [a.ttft_s is None for a in answers] == [True, False]


def test_refused_connection_has_no_ttft() -> None:
    jobs = [Job(0.0, 20)]
    answers = asyncio.run(client.replay(Target("127.0.0.1", 9), jobs, bodies(jobs), 1.0))
    assert answers[0].ttft_s is None


def test_closed_loop_keeps_clients_busy() -> None:
    jobs = [Job(0.0, 50)] * 3

    def attempt(_i: int) -> bool:
        loop, _ = run_against_server(lambda target: client.closed(target, bodies(jobs), 4, 1.0, 0.1))
        assert loop.failed == 0
        if not loop.ttft_s:
            return False
        ttft_s = statistics.median(loop.ttft_s)
        assert ttft_s > 0.048
        assert loop.steady.requests_per_s < 1.1 * 4 / 0.05
        return ttft_s < 0.05 + BUSY_S and loop.steady.requests_per_s > 4 / (0.05 + BUSY_S)

    repeat_until(attempt, "clients are busy")


def test_closed_loop_reruns_longer_while_littles_law_fails() -> None:
    jobs = [Job(0.0, 900), *([Job(0.0, 20)] * 2000)]

    def attempt(_i: int) -> bool:
        loop, lengths = run_against_server(
            lambda target: asyncio.to_thread(closed_loop, target, bodies(jobs), 4, 0.4, 0.1)
        )
        assert loop.steady.holds
        return loop.end_s - loop.begin_s >= 0.8 - 1e-6 and lengths.count(900) == 1

    repeat_until(attempt, "the first loop is too short")


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
        loop.call_later(0.5, self.transport.write, b"%x\r\n%b\r\n0\r\n\r\n" % (len(last), last))


def test_stream_ttft_is_time_of_first_event() -> None:
    prompts = Prompts((3, 100), 1, 4096, reuse=False, prefill_only=False, answer=4)
    jobs = [Job(0.0, 20), Job(0.0, 13)]

    async def run() -> tuple[list[client.Answer], client.Loop]:
        server = await asyncio.get_running_loop().create_server(Streaming, "127.0.0.1", 0)
        async with server:
            target = Target("127.0.0.1", server.sockets[0].getsockname()[1])
            answers = await client.replay(target, jobs, prompts.bodies(jobs, 1), 60.0)
            return answers, await client.closed(target, prompts.bodies(jobs[:1], 1), 1, 1.0, 0.0)

    def attempt(_i: int) -> bool:
        (whole, failed), loop = asyncio.run(run())
        assert whole.ttft_s is not None
        assert whole.ttft_s > 0.048
        assert failed.ttft_s is None
        return whole.ttft_s < 0.4 and bool(loop.ttft_s) and loop.ttft_s[0] < loop.whole_s[0] - 0.1

    repeat_until(attempt, "the first event comes before the last")


def test_connection_closed_by_server_is_not_reused() -> None:
    class Once(Slow):
        lengths: list[int] = []  # noqa: RUF012

        def answer(self, tokens: int) -> None:
            super().answer(tokens)
            asyncio.get_running_loop().call_later(0.02, self.transport.close)

    async def run() -> None:
        server = await asyncio.get_running_loop().create_server(Once, "127.0.0.1", 0)
        async with server:
            pool = client.Pool(Target("127.0.0.1", server.sockets[0].getsockname()[1]))
            for raw in bodies([Job(0.0, 20)] * 3):
                assert (await pool.ask(raw))[0] is not None
                while pool._all[-1].open:
                    await asyncio.sleep(0.01)
            assert len(pool._all) == 3

    asyncio.run(run())


def test_request_on_connection_that_server_closes_is_sent_again() -> None:
    class Closing(Slow):
        lengths: list[int] = []  # noqa: RUF012
        answered = False

        def answer(self, tokens: int) -> None:
            super().answer(tokens)
            self.answered = True

        def data_received(self, data: bytes) -> None:
            if self.answered:
                self.transport.abort()
            else:
                super().data_received(data)

    async def run() -> None:
        server = await asyncio.get_running_loop().create_server(Closing, "127.0.0.1", 0)
        async with server:
            pool = client.Pool(Target("127.0.0.1", server.sockets[0].getsockname()[1]))
            first = await asyncio.gather(*map(pool.ask, bodies([Job(0.0, 20)] * 3)))
            (again,) = [await pool.ask(raw) for raw in bodies([Job(0.0, 20)])]
            assert all(took is not None for took, _ in (*first, again))
            assert len(pool._all) == 4

    asyncio.run(run())


def test_closed_loop_client_stops_after_failure() -> None:
    loop, lengths = run_against_server(lambda target: client.closed(target, bodies([Job(0.0, 13)]), 3, 1.0, 0.0))
    assert (loop.failed, len(lengths), loop.ttft_s) == (3, 3, [])


def test_job_deadline_is_sent_as_custom_param() -> None:
    told, plain = (json.loads(raw.partition(b"\r\n\r\n")[2]) for raw in bodies([Job(0.0, 3, slo_s=0.05), Job(0.0, 3)]))
    assert told["sampling_params"]["custom_params"] == {"ttft_slo_ms": 50.0}
    assert "custom_params" not in plain["sampling_params"]
    assert told["bootstrap_room"] != plain["bootstrap_room"]
