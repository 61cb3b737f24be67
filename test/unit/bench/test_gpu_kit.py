"""Kit for machines with a GPU: measured pieces are kept, and a failing piece does not stop the others."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from benchmark.gpu import answers, kit, latency
from benchmark.gpu.answers import Answer
from benchmark.gpu.kit import Kit
from benchmark.results.piece import Piece
from benchmark.rig import devices
from benchmark.rig.progress import Progress


def make_kit(out: Path, wanted: list[str], minutes: float = 30.0) -> Kit:
    return Kit(out, Progress(), wanted, minutes, [])


def piece(title: str = "one") -> Piece:
    return Piece("any", title, "", 0)


def test_finished_measurement_is_saved_and_kept_by_next_run(tmp_path: Path) -> None:
    first = make_kit(tmp_path, ["a"])
    first.measure("a", lambda: piece("first"))
    again = make_kit(tmp_path, ["a"])
    assert not again.wants("a")
    again.measure("a", lambda: piece("second"))
    found = again.collected(["a"])
    assert found.pieces["gpu-a"][0].title == "first"
    assert not found.missing


def test_measurement_of_another_commit_is_repeated(tmp_path: Path) -> None:
    make_kit(tmp_path, ["a"]).measure("a", lambda: piece("first"))
    file = tmp_path / "gpu-a" / "piece.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "commit": "0000000"}))
    assert make_kit(tmp_path, ["a"]).wants("a")


def test_failed_measurement_is_noted_and_next_one_runs(tmp_path: Path) -> None:
    one = make_kit(tmp_path, ["a", "b"])

    def broken() -> Piece:
        raise RuntimeError("no kernel image\nand a page of words")

    one.measure("a", broken)
    one.measure("b", piece)
    found = one.collected(["a", "b"])
    assert found.missing == {"gpu-a": "RuntimeError: no kernel image"}
    assert list(found.pieces) == ["gpu-b"]


def test_slow_measurement_is_stopped_at_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kit, "PIECE_S", 0.1)
    one = make_kit(tmp_path, ["a"])

    def slow() -> Piece:
        time.sleep(60.0)
        return piece()

    one.measure("a", slow)
    assert "took longer" in one.missing["a"]


def test_slow_event_loop_measurement_is_stopped_at_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import asyncio

    import uvloop

    monkeypatch.setattr(kit, "PIECE_S", 0.1)
    one = make_kit(tmp_path, ["a"])

    def slow() -> Piece:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(asyncio.sleep(60.0))
        return piece()

    one.measure("a", slow)
    assert "took longer" in one.missing["a"]


def test_no_measurement_starts_after_time_is_used_up(tmp_path: Path) -> None:
    one = make_kit(tmp_path, ["a"], minutes=0.0)
    one.measure("a", piece)
    assert "no time" in one.missing["a"]


def test_answer_is_wrong_only_if_model_was_sure() -> None:
    device = answers.small(False, 1)
    sure, tie = Answer(1, -0.1, 2.0), Answer(1, -0.7, 0.001)
    other = Answer(2, -0.7, 0.001)
    found = answers.piece_of([sure, tie], [sure, other], [64, 64], 3, device, 1, 0)
    assert [f.value for f in found.figures[:3]] == [0.0, 3.0, 1.0]
    found = answers.piece_of([sure, tie], [other, tie], [64, 64], 3, device, 1, 0)
    assert found.figures[0].value == 1.0
    assert found.figures[0].met is False


def test_chunks_cover_prompt_and_profile_matches_gpu() -> None:
    assert latency.steps(20000) == [(8192, 0), (8192, 8192), (3616, 16384)]
    assert latency.of_this_gpu("NVIDIA H100 80GB HBM3, 580").name == "h100-qwen3-8b"
    assert latency.of_this_gpu("NVIDIA H200, 580").name == latency.of_this_gpu("").name == "h200-qwen3-8b"


def test_gpu_server_layers_match_profile() -> None:
    assert devices.DEVICES[devices.CUDA].layers == latency.of_this_gpu("").layers
