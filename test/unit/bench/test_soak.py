"""Soak test: growth of memory, reading of memory, and requests of the load."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
from pathlib import Path

import psutil
import pytest
from soak import __main__ as soak
from soak import load, memory
from soak.load import Load
from soak.memory import Growth, Record, Sample

from benchmark.results.piece import Piece

ROLLUP = """\
5589d9800000-7ffd2a1f3000 ---p 00000000 00:00 0                          [rollup]
Rss:              884972 kB
Pss:              741235 kB
Pss_Dirty:        700000 kB
Pss_Anon:         691000 kB
Pss_File:          50000 kB
Pss_Shmem:           235 kB
Shared_Clean:     143000 kB
Private_Clean:     10000 kB
Private_Dirty:    690000 kB
"""


def test_parse_rollup_reads_memory_figures() -> None:
    assert memory.parse_rollup(ROLLUP) == (691235, 741235, 700000)
    with pytest.raises(KeyError):
        memory.parse_rollup(ROLLUP.replace("Pss:", "Pxx:"))


def test_process_is_sampled_until_exit() -> None:
    me = memory.sample(psutil.Process(), 3.0)
    assert me is not None
    assert me.at_s == 3.0
    assert 0 < me.own <= (me.pss or 0)
    assert min(me.threads, me.descriptors) >= 1
    child = psutil.Popen(["sleep", "60"])
    record = Record({"child": psutil.Process(child.pid)})
    record.take_samples(0.0)
    child.kill()
    child.wait()
    record.take_samples(1.0)
    assert [s.at_s for s in record.samples["child"]] == [0.0]


def record(pss: list[float], every_s: float = 30.0) -> Record:
    made = Record({})
    made.samples["p"] = [Sample(i * every_s, round(x), None, None, 1, 9 + i, 0.5 * i) for i, x in enumerate(pss)]
    return made


@pytest.mark.parametrize(
    ("pss", "ratio", "fine"),
    [
        ([500.0] * 4 + [1000.0] * 10, 1.0, True),  # growth before the end of the run-in does not count
        ([1000.0] * 11 + [1050.0] * 3, 1.05, True),
        ([1000.0] * 11 + [1051.0] * 3, 1.051, False),
        ([1000.0] * 13 + [9000.0], 1.0, True),  # a single sample does not count
        ([1000.0] * 11 + [500.0] * 3, 0.5, True),  # shrinking is no leak
        ([1000.0] * 9, None, False),  # the process has ended
        ([], None, False),
    ],
)
def test_growth_compares_minute_after_run_in_with_last_minute(
    pss: list[float], ratio: float | None, fine: bool
) -> None:
    (growth,) = record(pss).growth(run_in_s=120.0, end_s=390.0)
    assert (growth.ratio, growth.acceptable) == (ratio, fine)
    assert str(growth).startswith("p: ")


def test_cores_sum_over_all_processes() -> None:
    made = record([1.0] * 5)
    made.samples["q"] = list(made.samples["p"])
    assert made.cores() == pytest.approx(2 * 0.5 / 30)


def test_sample_times_include_end() -> None:
    assert list(memory.sample_times(70.0)) == [0.0, 30.0, 60.0, 70.0]
    assert list(memory.sample_times(60.0)) == [0.0, 30.0, 60.0]


def test_result_names_grown_processes_and_missed_bars(tmp_path: Path) -> None:
    made, args = record([1000.0] * 11 + [2000.0] * 3), argparse.Namespace(minutes=6.5, run_in=2.0, rate=1.0, seed=1)
    made.samples["gone"] = []
    sent = Load(1, 1, 1.0)
    sent.ends.update(answered=5, failed=1)
    soak.make_piece(args, sent, made).write(tmp_path)
    piece = Piece.read(tmp_path)
    assert [f.name for f in piece.figures if f.met is False] == [
        "memory of p",
        "memory of gone",
        "requests that failed",
    ]
    assert piece.data["grown"] == ["p: 1.0 MiB, then 2.0 (+100.0%)", "gone: not there after the run-in"]
    assert len(piece.data["samples"]["p"]) == 14
    assert str(Growth("p", 10.0, None)) == "p: not there at the end"


def test_load_limits_requests_in_flight() -> None:
    async def run() -> Load:
        under_way = asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            await under_way.wait()
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            made = Load(server.sockets[0].getsockname()[1], 1, 500.0)
            running = asyncio.ensure_future(made.run(under_way.is_set))
            while made.ends["not sent"] < 50:
                await asyncio.sleep(0.01)
            under_way.set()
            await running
        return made

    made = asyncio.run(run())
    # A disconnect lets another request start.
    assert load.MAX_IN_FLIGHT <= made.sent + made.ends["left"] < 200
    assert not made.wrong


def test_too_short_run_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        soak.main(["--minutes", "11"])
    assert "less than two minutes after the run-in" in capsys.readouterr().err


def test_load_uses_all_prompt_sets_with_shared_prefixes() -> None:
    made = Load(1, 1, 3.0)
    span_s = load.SEGMENT_S * len(load.WORKLOADS)
    jobs = list(itertools.takewhile(lambda one: one[0] < (load.SETS + 1) * span_s, made.jobs()))
    assert len(jobs) / ((load.SETS + 1) * span_s) == pytest.approx(3.0, rel=0.35)
    assert {prompts for _, prompts, _ in jobs} == set(range(load.SETS))
    assert any(job.continues_stream and job.cached for *_, job in jobs)
    assert max(job.new + job.cached for *_, job in jobs) <= load.SCALE.longest
    job = next(job for *_, job in jobs if job.continues_stream and job.cached > 100)
    texts = [made._text(job, 0, random.Random(i), load.CHAT)[1]["messages"][0]["content"] for i in range(2)]
    assert texts[0] == texts[1] != made._text(job, 1, random.Random(0), load.CHAT)[1]["messages"][0]["content"]
    ids = [made._generate(job, random.Random(i))[1]["input_ids"] for i in range(2)]
    assert ids[0] == ids[1]
    assert len(ids[0]) == job.cached + job.new
