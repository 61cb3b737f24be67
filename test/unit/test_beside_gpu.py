"""The simulator compared with a real GPU: it replays the arrivals of a measured piece."""

from __future__ import annotations

import pytest

from benchmark.fidelity import gpu
from benchmark.rig import FCFS, LAPS
from benchmark.rig.model import REPO


def test_the_arrivals_of_a_piece_are_simulated_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "WORKLOADS", ("code",))
    piece = gpu.measure(gpu.COMMAND.parse(["--from", str(REPO / "benchmark" / "report")]))
    of = piece.data["code"]
    assert of[FCFS]["gpu"]["mean"] > of[LAPS]["gpu"]["mean"] > 0.0
    for policy in of.values():
        assert policy["simulated"]["mean"] == pytest.approx(policy["gpu"]["mean"], rel=0.3)
    assert [f.name.rsplit(", ", 1)[1] for f in piece.figures] == ["gpu", "simulated"]
    assert all(0.5 < f.value < 1.0 for f in piece.figures)


def test_a_piece_that_is_not_there_is_named(tmp_path: object) -> None:
    with pytest.raises(OSError, match="gpu-mixed"):
        gpu.measure(gpu.COMMAND.parse(["--from", str(tmp_path)]))
