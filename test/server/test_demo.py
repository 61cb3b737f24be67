"""The demo: a brief run from end to end, an interrupt, a server that hangs."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import warm
from laps_plan.traffic.job import Job
from served import make_checkpoint

from benchmark import demo
from benchmark.load.client import UNANSWERED, Answer
from benchmark.results.piece import Piece
from benchmark.rig import fleet, variants
from benchmark.rig.model import REPO
from benchmark.rig.servers import ServerError

DEMO = [sys.executable, "-m", "benchmark.demo"]


def ends_of(logs: Path) -> str:
    """Return the last lines of each server's log."""
    return "".join(f"\n--- {log.name}\n{log.read_text(errors='replace')[-3000:]}" for log in sorted(logs.glob("*.log")))


@pytest.mark.timeout(750)
def test_demo_writes_table_picture_and_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs with a smaller model than a user's demo, and with shorter warm-up prompts."""
    warm_up = fleet.warm_up
    monkeypatch.setattr(fleet, "warm_up", lambda target, prompts, longest: warm_up(target, prompts, 256))
    monkeypatch.setattr(demo, "DEVICE", replace(demo.DEVICE, checkpoint=make_checkpoint))
    monkeypatch.setenv(warm.COLD_VARIABLE, variants.ON)  # one server imports for itself, as a user's servers do
    try:
        assert demo.COMMAND.main(["--rounds", "1", "--seconds", "1", "--out", str(tmp_path)]) == 0
    except (SystemExit, AssertionError) as e:
        pytest.fail(f"{e}{ends_of(tmp_path / 'logs')}")
    assert "laps / fcfs" in capsys.readouterr().out
    piece = Piece.read(tmp_path)
    assert piece.machine
    assert piece.versions
    for variant in ("laps", "fcfs"):
        figures = piece.data["variants"][variant]
        assert figures["failed"] == 0
        assert figures["rps"] > 0
        assert set(figures["short"]) == set(figures["long"]) == {"p50_ms", "p90_ms", "p99_ms"}
    assert (tmp_path / "ttft.png").read_bytes()[:4] == b"\x89PNG"


def test_error_names_server_with_unanswered_requests(tmp_path: Path) -> None:
    job = Job(0.0, 40)
    answers = [Answer(job, 0.0, 0.0, 0.1), Answer(job, 0.0, 0.0, None, UNANSWERED)]
    demo.require_answers(answers[:1], "fcfs", tmp_path)
    with pytest.raises(ServerError, match="1 of 2 requests to fcfs had no answer"):
        demo.require_answers(answers, "fcfs", tmp_path)


def command_of(process: psutil.Process) -> str:
    """Return the command line of a process; empty if the process has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def test_interrupt_stops_all_child_processes(tmp_path: Path) -> None:
    running = subprocess.Popen([*DEMO, "--out", str(tmp_path)], cwd=REPO, stderr=subprocess.PIPE, text=True)
    children: list[psutil.Process] = []
    end = time.monotonic() + 300
    while not any("launch_server" in command_of(c) for c in children):
        assert time.monotonic() < end, "it starts no server"
        time.sleep(0.5)
        children = psutil.Process(running.pid).children(recursive=True)
    time.sleep(1.0)
    children = psutil.Process(running.pid).children(recursive=True)
    running.send_signal(signal.SIGINT)
    _, told = running.communicate(timeout=180)
    assert running.returncode == 130
    assert "every server it started has been stopped" in told
    assert not [c for c in children if c.is_running() and c.status() != psutil.STATUS_ZOMBIE]
