"""The demo of a server that prefills and decodes: a brief run, a server that fails, and the figures."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from benchmark import colocated, demo_colocated
from benchmark.colocated import DEFAULT, LAPS, Request
from benchmark.results.piece import Piece
from benchmark.rig import model
from benchmark.rig.model import REPO

BRIEF = ["--seconds", "1", "--streams", "1", "--longs", "1", "--shorts", "2"]
SMALL = replace(model.EMULATED, layers=4)
"""Small model that prefills a long prompt of the demo quickly; a user's demo has a larger model."""


@pytest.mark.timeout(650)
def test_demo_writes_table_picture_and_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(colocated, "SHAPE", SMALL)
    assert demo_colocated.COMMAND.main([*BRIEF, "--out", str(tmp_path)]) == 0
    assert "laps / stock" in capsys.readouterr().out
    piece = Piece.read(tmp_path)
    assert set(piece.data["variants"]) == {LAPS, DEFAULT}
    assert all(figures[name] > 0 for figures in piece.data["variants"].values() for name in demo_colocated.SHOWN)
    assert piece.data["decode"]["steps"] > 0
    assert (tmp_path / demo_colocated.PICTURE).read_bytes()[:4] == b"\x89PNG"


@pytest.mark.timeout(650)
def test_failed_server_start_is_reported_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(colocated, "SHAPE", SMALL)
    monkeypatch.setenv("SGLANG_LAPS_SCHEDULER", "no configuration")
    with pytest.raises(SystemExit) as ended:
        demo_colocated.COMMAND.main([*BRIEF, "--out", str(tmp_path)])
    assert re.fullmatch(r"demo colocated: server \(laps\) ended with code .*", str(ended.value))


def test_table_shows_ratio_of_laps_to_stock() -> None:
    result = {name: dict.fromkeys(colocated.NAMES, by) for name, by in ((LAPS, 0.05), (DEFAULT, 0.5))}
    rows = demo_colocated.table(result).rows
    assert list(rows[-1]) == ["laps / stock", *["0.10"] * len(demo_colocated.SHOWN)]


def test_picture_times_are_relative_to_round_start() -> None:
    stream, document = Request("stream", [1], 2, 0.5), Request("long", [1], 1, 1.0)
    stream.sent_s, stream.came_s = 10.5, [11.0, 11.5]
    document.sent_s, document.came_s = 11.0, [13.0]
    assert colocated.tokens([stream, document]) == ([[1.0, 1.5]], [(1.0, 3.0)])


def test_unknown_demo_is_refused_in_one_line() -> None:
    done = subprocess.run([REPO / "run", "demo", "both"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "run: no demo 'both': colocated, or none for the router's\n"
