"""What aiperf is given, what is read of what it leaves, and how it is run; no aiperf is needed for it."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from laps_plan.traffic.job import Job

import benchmark.aiperf
from benchmark import report
from benchmark.load import aiperf
from benchmark.rig.servers import ServerError

JOBS = [Job(0.0, 10), Job(0.5, 1, cached=2 * aiperf.BLOCK), Job(1.25, 200, cached=aiperf.BLOCK + 1), Job(2.0, 64)]
OURS, THEIRS = benchmark.aiperf.OURS, benchmark.aiperf.THEIRS


def program(folder: Path, text: str) -> str:
    path = folder / "aiperf"
    path.write_text(f"#!{sys.executable}\n{text}")
    path.chmod(0o755)
    return str(path)


def alive(pid: int) -> bool:
    """Whether it runs; one that has ended may still be in the table, where nobody has asked for its exit code."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def left(folder: Path, name: str, text: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    return folder


def test_a_trace_is_in_mooncakes_format(tmp_path: Path) -> None:
    aiperf.write(aiperf.trace(JOBS, 4), tmp_path / "new" / "trace.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "new" / "trace.jsonl").read_text().splitlines()]
    assert [set(row) for row in rows] == [{"timestamp", "input_length", "output_length", "hash_ids"}] * 4
    assert [row["timestamp"] for row in rows] == [0, 500, 1250, 2000]
    assert [row["input_length"] for row in rows] == [10, 129, 265, 64]
    assert {row["output_length"] for row in rows} == {4}


def test_each_block_has_an_id_and_only_what_is_cached_is_shared() -> None:
    rows = list(aiperf.trace(JOBS, 4))
    assert [len(row.hash_ids) for row in rows] == [1, 3, 5, 1]
    every = [i for row in rows for i in row.hash_ids]
    # One block of the third prompt is in the second one; its odd cached token is not worth a block.
    assert rows[1].hash_ids[0] == rows[2].hash_ids[0]
    assert len(set(every)) == len(every) - 1


def test_streams_share_nothing() -> None:
    first, second = aiperf.trace([Job(0.0, 1, 640, stream=n) for n in (1, 2)], 1)
    assert not set(first.hash_ids) & set(second.hash_ids)


def test_the_command_line() -> None:
    line = aiperf.command("x", "http://h:1", "chat", Path("t.jsonl"), Path("a"), 7, raw=True)
    said = dict(itertools.pairwise(line))
    assert line[:2] == ["x", "profile"]
    assert (said["--url"], said["--endpoint-type"], said["--tokenizer"]) == ("http://h:1", "chat", aiperf.TOKENIZER)
    assert (said["--input-file"], said["--custom-dataset-type"]) == ("t.jsonl", "mooncake_trace")
    assert (said["--random-seed"], said["--isl-block-size"]) == ("7", str(aiperf.BLOCK))
    assert {"--fixed-schedule", "--streaming", "--no-gpu-telemetry", "--no-server-metrics"} <= set(line)
    assert said["--export-level"] == "raw"


def test_no_hub_is_asked_and_nothing_is_left_in_other_folders(tmp_path: Path) -> None:
    env = aiperf.environment({"HOME": "h", "PYTHONPATH": "ours"}, "scratch", tmp_path)
    assert env["HOME"] == "h"
    assert "PYTHONPATH" not in env
    assert (env["HF_HUB_OFFLINE"], env["TRANSFORMERS_OFFLINE"], env["HF_HUB_CACHE"]) == ("1", "1", str(tmp_path))
    assert env["TMPDIR"] == "scratch"
    assert Path(env["AIPERF_DATASET_MMAP_CACHE_DIR"]).is_relative_to(tmp_path)


def test_a_tokenizer_lies_where_a_hubs_client_finds_it(tmp_path: Path) -> None:
    huggingface_hub = pytest.importorskip("huggingface_hub")
    for version in ("one", "two"):
        left(tmp_path / version, "tokenizer.json", version)
        aiperf.hub(tmp_path / version, tmp_path / "hub")
        found = huggingface_hub.snapshot_download(aiperf.TOKENIZER, cache_dir=tmp_path / "hub", local_files_only=True)
        assert (Path(found) / "tokenizer.json").read_text() == version


def test_what_it_saw(tmp_path: Path) -> None:
    ttft = {"unit": "ms", "avg": 32.5, "p50": 31.9, "p90": 33, "count": 39, "std": 1.4}
    export = {"aiperf_version": "1", "time_to_first_token": ttft, "request_count": {"unit": "requests", "avg": 40.0}}
    folder = left(tmp_path, "profile_export_aiperf.json", json.dumps(export))
    assert aiperf.summary(folder) == aiperf.Summary(p50=31.9, p90=33.0, avg=32.5, answered=40, version="1")


def test_what_it_sent_is_in_the_order_of_the_trace(tmp_path: Path) -> None:
    def raw(number: int) -> dict[str, Any]:
        return {"metadata": {"session_num": number, "x": 1}, "payload": {"prompt": f"p{number}"}, "responses": []}

    lines = "".join(json.dumps(raw(n)) + "\n" for n in (2, 0, 1))
    sent = aiperf.sent(left(tmp_path, "profile_export_raw.jsonl", lines))
    assert [(one.number, one.payload["prompt"]) for one in sent] == [(0, "p0"), (1, "p1"), (2, "p2")]


@pytest.mark.parametrize("text", [None, "", "{", "[]", '{"request_count": {"avg": 0}}', '{"payload": {}}'])
def test_what_cannot_be_read_is_told_in_one_line(text: str | None, tmp_path: Path) -> None:
    for name, read in (("profile_export_aiperf.json", aiperf.summary), ("profile_export_raw.jsonl", aiperf.sent)):
        if text is not None:
            left(tmp_path, name, text)
        if (text, name) == ("", "profile_export_raw.jsonl"):
            assert read(tmp_path) == []
            continue
        with pytest.raises(ServerError, match=f"aiperf left no .*{name}") as told:
            read(tmp_path)
        assert len(str(told.value).splitlines()) == 1


def test_it_is_found_where_the_variable_or_the_path_says(tmp_path: Path) -> None:
    named = program(tmp_path, "")
    assert aiperf.found({"AIPERF": named, "PATH": "/none"}) == named
    assert aiperf.found({"PATH": str(tmp_path)}) == named
    assert aiperf.lacking({"PATH": str(tmp_path)}) == ""
    for environ in ({"PATH": "/none"}, {"PATH": str(tmp_path), "AIPERF": "/none/aiperf"}):
        with pytest.raises(ServerError) as told:
            aiperf.found(environ)
        assert str(told.value) == aiperf.lacking(environ)
    assert aiperf.lacking({"PATH": "/none"}) == aiperf.MISSING


def test_a_run_has_a_folder_for_scratch_that_goes_with_it(tmp_path: Path) -> None:
    text = "import os, pathlib; print(os.environ['TMPDIR']); pathlib.Path(os.environ['TMPDIR'], 'x').touch()"
    aiperf.run([program(tmp_path, text)], tmp_path / "logs" / "log", tmp_path / "cache", 60.0)
    assert not Path((tmp_path / "logs" / "log").read_text().strip()).exists()


def test_a_run_that_fails_names_its_log(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match=r"ended with code 3; its log: .*/log"):
        aiperf.run([program(tmp_path, "raise SystemExit(3)")], tmp_path / "log", tmp_path / "cache", 60.0)


@pytest.mark.parametrize(("last", "told"), [("time.sleep(600)", "did not end within"), ("sys.exit(1)", "code 1")])
def test_nothing_that_a_run_has_started_outlives_it(last: str, told: str, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    text = f"""
import os, pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path({str(pids)!r}).write_text(f"{{os.getpid()}} {{child.pid}}")
{last}
"""
    with pytest.raises(ServerError, match=told):
        # As long as a busy machine may take to start Python twice.
        aiperf.run([program(tmp_path, text)], tmp_path / "log", tmp_path / "cache", 15.0)
    # One killed ends as soon as it is given a core.
    end = time.monotonic() + 60.0
    while any(alive(int(pid)) for pid in pids.read_text().split()):
        assert time.monotonic() < end
        time.sleep(0.05)


def test_the_load_is_the_share_of_time_that_was_asked_for() -> None:
    jobs = benchmark.aiperf.jobs_of(lambda tokens: tokens / 10_000, 0.5, 60.0, seed=3)
    assert jobs[0].at_s == 0.0
    assert jobs[-1].at_s < 60.0
    # Consecutive rows are not exactly as long as the whole trace is on average.
    assert sum(job.new for job in jobs) / 10_000 == pytest.approx(30.0, rel=0.3)
    assert {job.stream for job in jobs} == set(range(benchmark.aiperf.SYSTEM_PROMPTS))


def test_the_piece_compares_medians() -> None:
    def seen(p50: float) -> list[dict[str, float]]:
        return [{"p50": p50, "p90": 2 * p50, "avg": p50}] * 5

    args = argparse.Namespace(rounds=5, seconds=10.0, endpoint="completions", seed=1)
    piece = benchmark.aiperf.piece_of({OURS: seen(80.0), THEIRS: seen(100.0)}, JOBS, "0.13.0", args)
    first = piece.figures[0]
    assert (first.value, first.met, first.rounds) == (pytest.approx(0.8), False, 5)
    assert [f.met for f in piece.figures[1:]] == [None, None]
    assert piece.data["new_tokens"] == [10, 1, 200, 64]
    assert piece.data["aiperf"] == "0.13.0"
    assert "80.0" in str(piece.tables[0])


@pytest.mark.parametrize(
    "argv", [["--rounds", "0"], ["--seconds", "0"], ["--utilisation", "1.5"], ["--utilisation", "nan"]]
)
def test_one_line(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        benchmark.aiperf.main(argv)
    assert stop.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_without_aiperf_nothing_is_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AIPERF", "/none/aiperf")
    with pytest.raises(SystemExit) as stop:
        benchmark.aiperf.main(["--out", str(tmp_path / "out")])
    assert stop.value.code == "benchmark.aiperf: AIPERF=/none/aiperf is no program"
    assert not (tmp_path / "out").exists()


def test_the_report_goes_on_without_aiperf(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AIPERF", "/none/aiperf")
    (tmp_path / "README.md").write_text("")
    argv = ["--only", "aiperf", "--work", str(tmp_path / "work"), "--out", str(tmp_path / "page")]
    assert report.main([*argv, "--readme", str(tmp_path / "README.md")]) == 0
    assert "aiperf: not run: AIPERF=/none/aiperf is no program" in capsys.readouterr().out
    assert "**aiperf**: not measured" in (tmp_path / "page" / "README.md").read_text()
