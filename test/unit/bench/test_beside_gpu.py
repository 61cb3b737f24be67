"""The simulator compared with a real GPU: it replays the arrivals of a measured piece."""

from __future__ import annotations

import pytest

from benchmark.fidelity import gpu
from benchmark.rig import FCFS, LAPS
from benchmark.rig.model import REPO


def test_simulator_replays_gpu_arrivals_and_matches_mean_ttft(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "WORKLOADS", ("code",))
    piece = gpu.measure(gpu.COMMAND.parse(["--from", str(REPO / "benchmark" / "report")]))
    of = piece.data["code"]
    assert of[FCFS]["gpu"]["mean"] > of[LAPS]["gpu"]["mean"] > 0.0
    for policy in of.values():
        assert policy["simulated"]["mean"] == pytest.approx(policy["gpu"]["mean"], rel=0.3)
    assert [f.name.rsplit(", ", 1)[1] for f in piece.figures] == ["gpu", "simulated"]
    assert all(0.5 < f.value < 1.0 for f in piece.figures)


def test_error_names_missing_gpu_result(tmp_path: object) -> None:
    with pytest.raises(OSError, match="gpu-mixed"):
        gpu.measure(gpu.COMMAND.parse(["--from", str(tmp_path)]))
