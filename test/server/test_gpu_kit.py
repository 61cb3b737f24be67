"""The kit for machines with a GPU runs here, without one: the same code on emulated devices and tiny models."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import warm

from benchmark.results import page
from benchmark.rig.model import REPO


def kit(*words: str) -> subprocess.CompletedProcess[str]:
    command, env = warm.benchmark("benchmark.gpu")
    return subprocess.run(
        [*command, *words], env=env, cwd=REPO, capture_output=True, text=True, timeout=500, check=False
    )


def test_a_dry_run_leaves_a_page_and_is_not_run_again(tmp_path: Path) -> None:
    words = ("--dry-run", "--only", "answers,latency", "--out", str(tmp_path))
    done = kit(*words)
    assert done.returncode == 0, done.stdout + done.stderr
    answers = json.loads((tmp_path / "gpu-answers" / "piece.json").read_text())
    assert {f["name"]: f["met"] for f in answers["figures"] if f["bar"]} == {
        "first tokens that differ where the model was sure": True,
        "short batches that preempted": True,
    }
    told = (tmp_path / "page" / "README.md").read_text()
    assert "gpu-answers" in told
    assert "gpu-latency" in told
    assert (tmp_path / "page" / page.BENCH).exists()
    again = kit(*words)
    assert again.returncode == 0
    assert "begins" not in again.stdout


def test_without_a_gpu_it_says_so_in_one_line(tmp_path: Path) -> None:
    done = kit("--out", str(tmp_path))
    assert done.returncode == 2
    assert done.stderr.strip().endswith("there is no CUDA device here: --dry-run runs the same code without one")
