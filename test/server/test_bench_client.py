"""The comparison's client on a real prefill server, through --base-url."""

from __future__ import annotations

import csv
import gzip
from pathlib import Path

from served import NORMAL, Prefill, on

from benchmark.results.piece import Piece
from benchmark.serve import command as serve

pytestmark = on(NORMAL)


def test_every_request_is_answered_and_counted(prefill: Prefill, tmp_path: Path) -> None:
    before = prefill.totals()
    argv = ["--device", "cpu", "--base-url", prefill.server.url, "--workload", "mixed", "--longest", "1024"]
    assert serve.main([*argv, "--rounds", "1", "--seconds", "3", "--utilisation", "0.3", "--out", str(tmp_path)]) == 0
    piece = Piece.read(tmp_path)
    figures = piece.data["rounds"][serve.THERE][0]
    assert figures["failed"] == 0
    with gzip.open(tmp_path / "requests.csv.gz", "rt", newline="") as f:
        seen = list(csv.DictReader(f))
    assert len(seen) == figures["short"]["requests"] + figures["long"]["requests"] > 0
    assert {r["new_tokens"] for r in seen if r["kind"] == "long"} <= {"1024"}
    assert all(float(r["ttft_ms"]) > 0 for r in seen)
    # The server has counted at least those; the rest is what measured the machine.
    after = prefill.totals()
    for kind in ("short", "long"):
        assert after[kind]["requests"] - before[kind]["requests"] >= figures[kind]["requests"]
    assert 0.0 < piece.data["busy"][serve.THERE][0] < 1.0
    assert (tmp_path / "mixed.svg").exists()


def test_closed_loops(prefill: Prefill, tmp_path: Path) -> None:
    argv = ["--device", "cpu", "--base-url", prefill.server.url, "--workload", "closed", "--concurrency", "1", "4"]
    assert serve.main([*argv, "--longest", "512", "--rounds", "1", "--seconds", "1", "--out", str(tmp_path)]) == 0
    points = Piece.read(tmp_path).data["points"]
    assert list(points) == ["1", "4"]
    assert all(at[serve.THERE]["requests_per_s"][0] > 0 for at in points.values())
