"""A short fault campaign: everything real, every bar met. The long one is ``./run bench faults``."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import warm
from rounds import repeat_until

from benchmark.results.piece import Piece
from benchmark.rig.model import REPO

LIMIT_S = 1500.0
"""Time limit of one campaign (seconds): a minute or two of load, and starts of servers while other tests may use the
cores."""


def run_campaign(seconds: float, folder: Path) -> dict[str, float]:
    """Run a campaign, require every bar to be met, and return the figures."""
    folder.mkdir()
    command, env = warm.benchmark_command("faults")
    command += ["--requests", "500", "--seconds", f"{seconds:g}", "--seed", "1", "--out", str(folder)]
    with (folder / "output").open("w") as out:
        process = subprocess.Popen(command, env=env, cwd=REPO, stdout=out, stderr=subprocess.STDOUT, text=True)
        try:
            code = process.wait(LIMIT_S)
        finally:
            # On SIGTERM the campaign stops its servers.
            process.terminate()
            process.wait(60)
    told = (folder / "output").read_text()[-4000:]
    assert code == 0, told
    return {f.name: f.value for f in Piece.read(folder).figures}


@pytest.mark.timeout(2 * LIMIT_S)
def test_short_fault_campaign_meets_every_threshold(tmp_path: Path) -> None:
    said: list[dict[str, float]] = []

    def attempt(i: int) -> bool:
        # A slow machine serves fewer requests in this time.
        said.append(counts := run_campaign(40.0 * 3**i, tmp_path / str(i)))
        assert counts["hostile requests at both routers"] >= 200
        return counts["requests"] >= 300 and counts["faults of servers and router"] >= 8

    repeat_until(attempt, "enough requests and faults", lambda: said)
