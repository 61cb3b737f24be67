"""The command that compares simulated quotes with their outcomes."""

from __future__ import annotations

from pathlib import Path

from benchmark.results.piece import Piece
from benchmark.sim import quotes as simulated


def test_quotes_benchmark_compares_coverage_with_bar(tmp_path: Path) -> None:
    loads = ["--profiles", "h200-qwen3-8b", "--loads", "poisson", "--shares", "0.5"]
    assert simulated.COMMAND.main([*loads, "--requests", "400", "--out", str(tmp_path)]) == 0
    piece = Piece.read(tmp_path)
    (row,) = piece.tables[0].rows
    assert row[0] == "h200-qwen3-8b, poisson 50%"
    (figure,) = piece.figures
    assert figure.bar == "0.75..0.85"
    assert figure.met == (0.75 <= figure.value <= 0.85)
