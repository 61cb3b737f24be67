"""The cost of a scheduling round, measured briefly on real schedulers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import warm

from benchmark import rounds_cost


@pytest.mark.timeout(300)
def test_both_schedulers_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stock = subprocess.run

    def run(command: Sequence[str], **how: Any) -> Any:
        if command[0] != sys.executable:
            return stock(command, **how)
        return warm.SGLANG.run(*command[1:], timeout=how["timeout"], env=how["env"])

    monkeypatch.setattr(subprocess, "run", run)
    assert rounds_cost.main(["--lengths", "5,20", "--rounds", "1", "--out", str(tmp_path)]) == 0
    (found,) = tmp_path.glob("*.json")
    seconds = json.loads(found.read_text())["data"]["seconds"]
    assert set(seconds) == {"fcfs", "laps"}
    for by_length in seconds.values():
        assert all(took[0] > 0 for took in by_length.values())
        assert set(by_length) == {"5", "20"}


@pytest.mark.parametrize("bad", [["--lengths", "many"], ["--lengths", "0"], ["--rounds", "0"]])
def test_a_bad_argument_is_one_line(bad: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as e:
        rounds_cost.main(bad)
    assert e.value.code == 2
    assert bad[0] in capsys.readouterr().err.splitlines()[-1]
