"""Dry run of the GPU kit without a GPU: the same code on emulated devices and tiny models."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import warm

from benchmark.gpu import __main__ as gpu
from benchmark.gpu import answers, kit, latency
from benchmark.results import page
from benchmark.rig import fleet
from benchmark.rig.model import REPO


# The kit uses SIGALRM to end a piece that takes too long, so pytest must use a thread.
@pytest.mark.timeout(1500, method="thread")
def test_dry_run_writes_page_and_is_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs with fewer prompts than on a GPU, with shorter warm-up prompts, and with time for a busy machine."""
    for where, name, value in (
        (kit, "PIECE_S", 600.0),
        (answers, "TIMEOUT_S", 300.0),
        (answers, "LONGS", 12),
        (answers, "SHORTS", 60),
        (latency, "REPEATS", 1),
        (latency, "TOKENS", (16, 256, 4096)),
    ):
        monkeypatch.setattr(where, name, value)
    warm_up = fleet.warm_up
    monkeypatch.setattr(fleet, "warm_up", lambda target, prompts, longest: warm_up(target, prompts, 256))
    words = ["--dry-run", "--only", "answers,latency", "--out", str(tmp_path)]
    assert gpu.main(words) == 0, capsys.readouterr()
    piece = json.loads((tmp_path / "gpu-answers" / "piece.json").read_text())
    assert {f["name"]: f["met"] for f in piece["figures"] if f["bar"]} == {
        "first tokens that differ where the model was sure": True,
        "short batches that preempted": True,
    }
    told = (tmp_path / "page" / "README.md").read_text()
    assert "gpu-answers" in told
    assert "gpu-latency" in told
    assert (tmp_path / "page" / page.BENCH).exists()
    assert "answers: starts" in capsys.readouterr().out
    assert gpu.main(words) == 0
    assert "starts" not in capsys.readouterr().out


def test_missing_cuda_device_exits_2_with_hint(tmp_path: Path) -> None:
    command, env = warm.benchmark_command("benchmark.gpu")
    done = subprocess.run(
        [*command, "--out", str(tmp_path)], env=env, cwd=REPO, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 2
    assert done.stderr.strip().endswith("there is no CUDA device here: --dry-run runs the same code without one")
