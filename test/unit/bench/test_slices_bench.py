"""Figures of the benchmark of slices."""

from __future__ import annotations

import pytest

from benchmark.serve import slices
from benchmark.serve.slices import FCFS, LAPS, Round


def make_result(short: float, long: float, met: float) -> list[Round]:
    return [{"short": [short] * 3, "long": [long] * 3, "met": [met] * 4}] * 5


def test_bar_allows_short_request_to_wait_two_slices() -> None:
    for met in (0.11, 0.13):
        of = {FCFS: make_result(0.01, 1.5, 0.9), LAPS: make_result(0.0104, 1.6, met)}
        # A slice takes a sixteenth of 1.6 s.
        first, on_off, lone = slices.figures(of, 32)
        assert first.value == pytest.approx(met / (0.0104 + 0.1))
        assert first.met is (met == 0.11)
        assert (on_off.value, on_off.met) == (pytest.approx(1.6 / 1.5), False)
        assert (lone.value, lone.met) == (pytest.approx(1.04), False)


def test_blocking_time_is_extra_wait_over_lone_ttft() -> None:
    laps = [{"short": [0.1, 0.2, 0.1], "met": [0.1 + 0.004 * i for i in range(1, 11)]}] * 5
    assert slices.blocking(laps).value == pytest.approx(40.0, rel=0.02)
    for slice_ms, met in ((9.1, True), (8.9, False)):
        assert slices.blocking(laps, slow=4.0, slice_ms=slice_ms).met is met


def test_invalid_argument_prints_one_line_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        slices.COMMAND.main(["--rounds", "0"])
    assert stop.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
