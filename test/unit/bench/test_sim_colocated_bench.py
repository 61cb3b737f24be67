"""Study of simulated servers that decode: loads, figures, and results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from laps_plan.plan.whole import stock
from laps_plan.profile import Profile

from benchmark.results import bars
from benchmark.results.piece import Piece
from benchmark.sim import colocated
from benchmark.sim.colocated import Study


def study(requests: int = 100) -> Study:
    return Study("8b", Profile.load("h200-qwen3-8b"), requests, 0, Piece("x", "x", "x", 0))


def test_stock_settings_cover_all_chunks_and_flags() -> None:
    found = stock()
    assert len(found) == len({s.name for s in found}) == 30
    assert {s.chunk for s in found} == {512, 1024, 2048, 4096, 8192}
    assert sum(s.mixed for s in found) == sum(s.interval for s in found) == 10
    assert not any(s.mixed and s.interval for s in found)


def test_streams_with_long_prompts_are_judged_by_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(colocated, "SPAN_S", 6.0)
    made = study()
    made.beside_long_prompts()
    figures = {f.name: f for f in made.piece.figures}
    assert figures["8b: between tokens, P99 / target"].bar == str(bars.COLOCATED_P99)
    assert figures["8b: between tokens, longest / target"].met
    assert figures["8b: between tokens, longest, laps / stock as it is"].met


def test_chat_load_is_reproducible_and_has_answers() -> None:
    a, b = (study().chat(100).jobs for _ in range(2))
    assert list(a) == list(b)
    assert all(32 <= job.output <= 512 for job in a)
    loop = colocated.Chats(colocated.LENGTHS, 4, 8, 0)
    first = list(loop.arrivals())
    assert all(32 <= job.output <= 512 for job in first)
    following = loop.answered(1.0, first[0])
    assert following is not None
    assert following.client == first[0].client


def test_study_command_writes_all_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(colocated, "SPAN_S", 3.0)
    monkeypatch.setattr(colocated, "stock", lambda: [s for s in stock() if s.chunk == 8192])
    assert colocated.COMMAND.main(["--models", "8b", "--requests", "60", "--out", str(tmp_path)]) == 0
    piece = json.loads((tmp_path / "piece.json").read_text())
    names = [figure["name"] for figure in piece["figures"]]
    assert all(name.startswith("8b: ") for name in names)
    for part in ("short P90", "mean TTFT", "requests/s at saturation", "goodput, chat", "goodput, agents"):
        assert any(part in name for name in names)
    assert set(piece["data"]) == {"8b"}
