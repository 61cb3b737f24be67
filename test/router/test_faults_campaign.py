"""A short fault campaign: everything real, every bar met. The long one is ``./run bench faults``."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import warm

from benchmark.results.piece import Piece
from benchmark.rig.model import REPO

LIMIT_S = 1500.0
"""Time limit (seconds): a minute or two of load, and starts of servers while other tests may use the cores."""


@pytest.mark.timeout(LIMIT_S + 120)
def test_a_short_campaign_meets_every_bar(tmp_path: Path) -> None:
    command, env = warm.benchmark("faults")
    command += ["--requests", "500", "--seconds", "40", "--seed", "1", "--out", str(tmp_path)]
    with (tmp_path / "output").open("w") as out:
        process = subprocess.Popen(command, env=env, cwd=REPO, stdout=out, stderr=subprocess.STDOUT, text=True)
        try:
            code = process.wait(LIMIT_S)
        finally:
            # On SIGTERM the campaign stops its servers.
            process.terminate()
            process.wait(60)
    told = (tmp_path / "output").read_text()[-4000:]
    found = Piece.read(tmp_path)
    assert [str(f) for f in found.figures if f.met is False] == [], told
    assert code == 0, told
    counts = {f.name: f.value for f in found.figures}
    assert counts["requests"] >= 300
    assert counts["faults of servers and router"] >= 8
    assert counts["hostile requests at both routers"] >= 200
