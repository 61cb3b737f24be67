"""The commands that hold quotes and replays against what was measured."""

from __future__ import annotations

from pathlib import Path

import msgspec
from laps_core.config import LapsConfig
from laps_core.latency.step import Coefficients
from laps_core.receipts.quote import QuoteState
from laps_plan.traffic.job import Job

from benchmark.load.client import Answer
from benchmark.results.piece import Piece
from benchmark.serve import quotes as real
from benchmark.sim import quotes as simulated


def test_simulated_quotes_are_judged(tmp_path: Path) -> None:
    loads = ["--profiles", "h200-qwen3-8b", "--loads", "poisson", "--shares", "0.5"]
    assert simulated.main([*loads, "--requests", "400", "--out", str(tmp_path)]) == 0
    piece = Piece.read(tmp_path)
    (row,) = piece.tables[0].rows
    assert row[0] == "h200-qwen3-8b, poisson 50%"
    (figure,) = piece.figures
    assert figure.bar == "0.75..0.85"
    assert figure.met == (0.75 <= figure.value <= 0.85)


def test_what_a_client_has_measured_is_a_recording() -> None:
    state = QuoteState(
        model=Coefficients(0.0, 1e-4, 0.0, 0.0, 0.01), threshold=256, chunk=2048, short_batch=1024, layers=4
    )
    status = {
        "quote": msgspec.to_builtins(state), "config": LapsConfig().as_dict(), "slices": {"launch_ms": 3.0},
        "overlap": True, "quotes": {"outcomes": {c: {"inside": 4, "below": 1, "above": 2} for c in ("short", "long")}},
    }  # fmt: skip
    answers = [
        Answer(Job(2.0, 900), 2.0, 0.0, 0.5),
        Answer(Job(1.0, 20), 1.0, 0.0, 0.25),
        Answer(Job(3.0, 5), 3.0, 0.0, None),
    ]
    found = real._recording(answers, status)
    assert [(r.arrival_ms, r.new_tokens, r.cls, r.ttft_ms) for r in found.requests] == [
        (1000.0, 20, "short", 250.0), (2000.0, 900, "long", 500.0)
    ]  # fmt: skip
    assert (found.head.chunk, found.head.layers, found.head.launch_s, found.head.overlap) == (2048, 4, 0.003, True)
    assert real._counts(status).tolist() == [[4, 1, 2], [4, 1, 2]]
