"""Client of ``benchmark.serve`` on a real prefill server."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from served import NORMAL, Prefill, run_on

from benchmark.load.connection import Target
from benchmark.results.piece import Piece
from benchmark.rig.fleet import Fleet
from benchmark.rig.servers import HOST
from benchmark.rig.variants import LAPS
from benchmark.serve import command as serve

pytestmark = run_on(NORMAL)


class Up:
    """One server in place of a fleet."""

    def __init__(self, prefill: Prefill) -> None:
        self.url = Target(HOST, prefill.server.port)

    def target(self, _: str) -> Target:
        return self.url

    prefill = target


def run(prefill: Prefill, *argv: str) -> Piece:
    """Return the piece of ``benchmark.serve`` with these arguments."""
    args = serve.COMMAND.parse(["--device", "cpu", "--variants", LAPS, "--rounds", "1", *argv])
    up: Any = Up(prefill)
    ((piece, _),) = serve.run(args, cast(Fleet, up))
    return piece


def test_every_request_is_answered_and_counted(prefill: Prefill, tmp_path: Path) -> None:
    before = prefill.totals()
    load = ("--workload", "mixed", "--longest", "1024", "--seconds", "3", "--utilisation", "0.3")
    piece = run(prefill, *load, "--out", str(tmp_path))
    figures = piece.data["rounds"][LAPS][0]
    assert figures["failed"] == 0
    assert figures["short"]["requests"] + figures["long"]["requests"] > 0
    assert figures["mean_ms"] > 0
    # The server has counted at least these requests; further ones measured the machine.
    after = prefill.totals()
    for kind in ("short", "long"):
        assert after[kind]["requests"] - before[kind]["requests"] >= figures[kind]["requests"]
    assert 0.0 < piece.data["busy"][LAPS][0] < 1.0
    assert (tmp_path / "mixed.svg").exists()


def test_closed_loop_reports_throughput_for_each_concurrency(prefill: Prefill, tmp_path: Path) -> None:
    load = ("--workload", "closed", "--concurrency", "1", "4", "--longest", "512", "--seconds", "1")
    points = run(prefill, *load, "--out", str(tmp_path)).data["points"]
    assert list(points) == ["1", "4"]
    assert all(at[LAPS]["requests_per_s"][0] > 0 for at in points.values())
