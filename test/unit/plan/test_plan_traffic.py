"""Recorded traffic in every format, refused files, and made-up traffic."""

from __future__ import annotations

import gzip
import json
import random
import time
from pathlib import Path

import pytest
from laps_core.histogram import LengthCount
from laps_plan.traffic.files import kind_of, read
from laps_plan.traffic.given import Traffic, poisson
from laps_plan.traffic.job import Job
from laps_plan.traffic.mixed import by_hand, counted

CSV = "arrival_ms,new_tokens,cached_tokens\n0,10,0\n500,20,5\n"
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
)
MOONCAKE = [
    {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [1, 2, 3]},
    {"timestamp": 2500, "input_length": 1500, "output_length": 5, "hash_ids": [1, 2, 9]},
    {"timestamp": 3000, "input_length": 1024, "output_length": 5, "hash_ids": [1, 2]},
    {"timestamp": 4000, "input_length": 600, "output_length": 5, "hash_ids": [2, 3]},
]
BAILIAN = [
    {"chat_id": 1, "parent_chat_id": -1, "timestamp": 61.5, "input_length": 40, "output_length": 1, "type": "text",
     "turn": 1, "hash_ids": [7, 8, 9]},
    {"chat_id": 2, "parent_chat_id": 1, "timestamp": 62.0, "input_length": 50, "output_length": 1, "type": "text",
     "turn": 2, "hash_ids": [7, 8, 9, 4]},
]  # fmt: skip


def lines(rows: list[dict[str, object]]) -> str:
    return "\n".join(map(json.dumps, rows)) + "\n"


def write_trace(folder: Path, text: str) -> Path:
    path = folder / "trace"
    path.write_text(text)
    return path


def shape(traffic: Traffic) -> list[tuple[float, int, int]]:
    return [(round(job.at_s, 3), job.new, job.cached) for job in traffic.jobs]


@pytest.mark.parametrize(
    ("text", "kind", "found"),
    [
        (CSV, "csv", [(0.0, 10, 0), (0.5, 20, 5)]),
        ("session,t_ms,new_tokens\n7,0,10\n7,2000,20\n", "sessions", [(0.0, 10, 0), (2.0, 20, 0)]),
        (AZURE, "azure", [(0.0, 374, 0), (4.315, 396, 0)]),
        # Equal blocks after different prefixes are different; of a fully cached prompt one token is computed.
        (lines(MOONCAKE), "mooncake", [(0.0, 1100, 0), (2.5, 476, 1024), (3.0, 1, 1023), (4.0, 600, 0)]),
        (lines(BAILIAN), "bailian", [(0.0, 40, 0), (0.5, 2, 48)]),
    ],
)
def test_trace_format_is_detected_by_first_line_and_read(
    text: str, kind: str, found: list[tuple[float, int, int]], tmp_path: Path
) -> None:
    assert kind_of(text.splitlines()[0]) == kind
    path = write_trace(tmp_path, text)
    assert shape(read(path)) == shape(read(path, kind)) == found
    packed = tmp_path / "packed.gz"
    packed.write_bytes(gzip.compress(text.encode()))
    assert shape(read(packed)) == found


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("arrival_ms,new_tokens\n0,10\n5,many\n", "line 3"),
        ("arrival_ms,new_tokens\n0,10\n5,-1\n", "line 3"),
        ("arrival_ms,new_tokens\n0,10\nnan,1\n", "line 3"),
        ("arrival_ms,new_tokens\n0,10\n1e999,1\n", "line 3"),
        ("arrival_ms,new_tokens\n0\n1,2\n", "line 2"),
        ("arrival_ms,new_tokens\n0,10\n,1\n", "line 3: arrival_ms is empty"),
        (lines(MOONCAKE) + '{"x":' + "[" * 5000 + "\n", "line 5"),
        (AZURE + "yesterday,3,4\n", "line 4"),
        (lines(MOONCAKE) + '{"timestamp": 1\n', "line 5"),
        (lines(MOONCAKE) + '{"timestamp": 1, "input_length": 2.5}\n', "line 5"),
        ("words\n", "line 1"),
        ("", "line 1"),
        ('{"prompt": "x"}\n', "line 1"),
        (CSV[: CSV.index("500")], "1 requests"),
    ],
)
def test_broken_line_is_rejected_with_line_number(text: str, line: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=line) as e:
        read(write_trace(tmp_path, text))
    assert len(str(e.value).splitlines()) == 1


def test_rows_are_sorted_before_prefix_matching(tmp_path: Path) -> None:
    assert shape(read(write_trace(tmp_path, lines(MOONCAKE[::-1])))) == shape(
        read(write_trace(tmp_path, lines(MOONCAKE)))
    )


def test_trace_without_times_is_untimed(tmp_path: Path) -> None:
    traffic = read(write_trace(tmp_path, "new_tokens\n5\n6\n7\n"))
    assert not traffic.timed
    assert [job.new for job in traffic.jobs] == [5, 6, 7]
    assert traffic.at_rate(3.0).rate == pytest.approx(3.0)


def test_traffic_is_cut_and_scaled() -> None:
    traffic = Traffic([Job(float(i), 10 + i) for i in range(11)], "x")
    assert traffic.rate == 1.0
    assert traffic.at_rate(4.0).rate == pytest.approx(4.0)
    newest = traffic.cut(3, newest=True)
    assert [job.new for job in newest.jobs] == [18, 19, 20]
    assert "newest 3 of 11" in newest.notes[-1]
    assert traffic.cut(11, newest=False) is traffic


def test_hand_written_mix_has_given_shares() -> None:
    jobs = poisson(by_hand("90% uniform:10-20, 10% fixed:4000"), 4000, "x", rate=7.0).jobs
    long = [job for job in jobs if job.new == 4000]
    assert all(10 <= job.new <= 20 for job in jobs if job not in long)
    assert 0.07 < len(long) / len(jobs) < 0.13
    assert (len(jobs) - 1) / (jobs[-1].at_s - jobs[0].at_s) == pytest.approx(7.0, rel=0.1)


@pytest.mark.parametrize(
    "text", ["", "90% lmsys", "50% lmsys, 50% what:3", "100% log:5", "100% log:9-3", "100% fixed:0", "1.2.3% lmsys"]
)
def test_invalid_mix_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        by_hand(text)


def test_drawn_lengths_follow_counts() -> None:
    count = LengthCount()
    for _ in range(90):
        count.add(100, 30)
    for _ in range(10):
        count.add(5000, 0)
    draw, rng = counted(count.to_lengths(10.0)), random.Random(1)
    drawn = [draw(rng) for _ in range(2000)]
    short = [(new, cached) for new, cached in drawn if new <= 128]
    assert 0.85 < len(short) / len(drawn) < 0.95
    assert all(90 < new <= 128 and cached == 30 for new, cached in short)
    assert all(4096 < new <= 5792 and cached == 0 for new, cached in drawn if new > 128)


def test_empty_counts_are_rejected() -> None:
    with pytest.raises(ValueError, match="no request"):
        counted(LengthCount().to_lengths(10.0))


def test_sessions_start_at_random_times_and_wrap_around(tmp_path: Path) -> None:
    rows = [f"{session},{hour * 3_600_000},{hour + 1},5" for session in range(50) for hour in range(12)]
    path = write_trace(tmp_path, "\n".join(["session,t_ms,new_tokens,cached_tokens", *rows]))
    one, again, other = (read(path, seed=seed) for seed in (1, 1, 2))
    assert len(one.jobs) == 600
    assert max(job.at_s for job in one.jobs) < 4 * 3600.0
    assert shape(one) == shape(again) != shape(other)
    halves = [sum(job.at_s < 2 * 3600.0 for job in one.jobs if (job.new > 6) == late) for late in (False, True)]
    assert all(100 <= n <= 200 for n in halves), "as many at all times"
    assert "drawn" in one.notes[0]


@pytest.mark.parametrize("text", [CSV, "new_tokens\n5\n6\n", lines(MOONCAKE)])
def test_byte_order_mark_changes_nothing(text: str, tmp_path: Path) -> None:
    plain, marked = read(write_trace(tmp_path, text)), read(write_trace(tmp_path, "\ufeff" + text))
    assert (shape(marked), marked.timed) == (shape(plain), plain.timed)


def test_azure_times_are_utc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    try:
        rows = "2023-11-05 01:30:00,5,1\n2023-11-05 02:30:00,5,1\n"
        assert shape(read(write_trace(tmp_path, AZURE.splitlines()[0] + "\n" + rows)))[-1][0] == 3600.0
    finally:
        monkeypatch.undo()
        time.tzset()
