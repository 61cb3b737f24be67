"""Figures, ratios and tables from known answers."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from laps_plan.pictures import distributions
from laps_plan.traffic.job import LONG, SHORT, Job

from benchmark.load.client import Answer
from benchmark.results.metrics import Slo, curve, figures
from benchmark.serve import compare, tables
from benchmark.serve.compare import Compared, Measured
from benchmark.serve.headline import Terms, promise, worst

LONE = compare.Lone((100, 1000), (0.01, 0.10))
SLO = Slo(10.0, LONE)


def answer(at_s: float, new: int, ttft_s: float | None) -> Answer:
    return Answer(Job(at_s, new), at_s, 0.001, ttft_s)


def test_lone_ttft_is_interpolated_between_measured_lengths() -> None:
    assert LONE(550) == pytest.approx(0.055)
    assert LONE(10) == 0.01
    assert LONE(2000) == pytest.approx(0.20)


def test_figures_match_answers_of_round() -> None:
    seen = [answer(0.0, 100, 0.02), answer(1.0, 100, 0.2), answer(2.0, 1000, 0.5), answer(3.0, 1000, None)]
    f = figures(seen, SLO)
    assert f[SHORT]["requests"] == f[LONG]["requests"] == 2
    assert f[SHORT]["p50_ms"] == pytest.approx(110.0)
    assert f[SHORT]["slowdown_mean"] == pytest.approx(11.0)
    assert f[SHORT]["longest_wait_s"] == pytest.approx(0.19)
    assert f[SHORT]["goodput"] == 0.5
    assert f[LONG]["goodput"] == 0.5
    assert f["goodput"] == 0.5
    assert f["failed"] == 1
    # 2.5 s pass from the first request to the last answer.
    assert f["requests_per_s"] == pytest.approx(3 / 2.5)
    assert f["tokens_per_s"] == pytest.approx(1200 / 2.5)
    assert f["client_late_p99_ms"] == pytest.approx(1.0)
    assert f["mean_ms"] == pytest.approx(240.0)
    assert f["slowdown_mean"] == pytest.approx((2 + 20 + 5) / 3)


def test_class_without_requests_has_no_figures() -> None:
    f = figures([answer(0.0, 100, 0.02)], SLO)
    assert f[LONG]["requests"] == 0
    assert math.isnan(f[LONG]["p90_ms"])
    assert curve([answer(0.0, 100, 0.02)], LONG) == []


def make_comparison(factor: float, rounds: int = 5) -> Compared:
    """Return results where LAPS's TTFTs are ``factor`` times stock's; the machine drifts between rounds."""
    answers: dict[str, list[list[Answer]]] = {}
    for name, f in (("fcfs", 2.0), ("hrrn", 1.5), ("shortest-prefill-first", 1.0), ("laps", factor)):
        answers[name] = [
            [answer(0.1 * i, 100 if i % 2 else 1000, f * drift * (0.05 + 0.001 * i)) for i in range(20)]
            for drift in (1.0, 1.5, 0.7, 2.0, 1.0)[:rounds]
        ]
    return Compared(Measured(LONE, 10.0, "fcfs"), SLO, answers, {"laps": [0.5, 0.7, 0.6]})


def test_ratio_is_taken_per_round_and_needs_enough_rounds() -> None:
    r = make_comparison(0.25).comparison.ratio("laps", "fcfs", SHORT, "p90_ms")
    assert (r.median, r.low, r.high, r.verdict) == (
        pytest.approx(0.125), pytest.approx(0.125), pytest.approx(0.125), "less",
    )  # fmt: skip
    few = make_comparison(0.25, rounds=3).comparison.ratio("laps", "fcfs", SHORT, "p90_ms")
    assert few.verdict == "not shown"


def test_bars_compare_with_best_stock_policy() -> None:
    for factor, met in ((0.25, True), (0.8, False)):
        found = tables.judged(make_comparison(factor), "mixed")
        assert found[0].name == "short P90 TTFT, laps / shortest-prefill-first, the best of stock"
        assert found[0].value == pytest.approx(factor)
        assert found[0].met is met
        assert [f.value for f in found[1:3]] == [pytest.approx(factor)] * 2
        assert found[3].name == "long P90 TTFT, laps / fcfs"
        assert found[3].value == pytest.approx(factor / 2)


def test_bars_need_both_compared_variants() -> None:
    for gone in ("laps", "fcfs"):
        c = make_comparison(0.25)
        del c.answers[gone]
        names = [f.name for f in tables.judged(c, "mixed")]
        assert names == [] if gone == "laps" else all("fcfs" not in n for n in names)


TERMS = Terms(LONE, gap_s=0.03, guard=0.25, chunk=1024, slice_s=0.004, longest=4096)


def test_promise_is_judged_by_worst_round() -> None:
    table, found = promise(make_comparison(0.25), TERMS)
    assert {row[0] for row in table.rows} == {"fcfs", "shortest-prefill-first", "laps"}
    mine = {f.name: f for f in found}["longest long TTFT over the promised bound, laps"]
    assert mine.value == max(worst(r, LONG, TERMS) for r in make_comparison(0.25).answers["laps"])
    assert mine.met


def test_promised_bound_counts_earlier_waiting_requests() -> None:
    seen = [answer(0.0, 1000, 1.0), answer(0.1, 100, 0.1), answer(0.2, 1000, 2.0), answer(9.0, 1000, 0.5)]
    bounds = [TERMS.long_s(0.1 * n) for n in (1, 2, 1)]
    assert worst(seen, LONG, TERMS) == pytest.approx(max(1.0 / bounds[0], 2.0 / bounds[1]))
    # (2 A + 2 B) / guard, stretched by short batches; plus the running batches and the saved preemptions.
    gap, short, long = 0.03, LONE(512), LONE(4096) - LONE(3072)
    assert bounds[0] == pytest.approx(((0.2 + 2 * long) / 0.25 + gap) * (5.0 + short / gap) + 3 * short)
    assert worst(seen, SHORT, TERMS) == pytest.approx(0.1 / TERMS.short_s(100))
    assert math.isinf(worst([*seen, answer(9.5, 1000, None)], LONG, TERMS))
    assert math.isnan(worst(seen[:1], SHORT, TERMS))


def test_tables_have_row_per_variant_and_mark_missing_values() -> None:
    c = make_comparison(0.25)
    c.answers["laps"] = [[a for a in r if a.job.kind == SHORT] for r in c.answers["laps"]]
    names = list(c.answers)
    first, second = tables.results(c, "t")
    assert [row[0] for row in first.rows] == [row[0] for row in second.rows] == names
    assert first.rows[-1][4] == "-"
    over, found = tables.ratios(c, "fcfs")
    assert "laps" not in [row[0] for row in over[0].rows if row[4] != "-"]
    assert all("fcfs / fcfs" not in f.name for f in found)
    assert str(first).splitlines()[0] == "t"


def test_picture_is_reproducible_byte_for_byte(tmp_path: Path) -> None:
    curves: dict[str, dict[str, list[float]]] = {
        SHORT: {"fcfs": [1.0, 2.0, 3.0], "laps": [0.5, 0.6, 0.7]},
        LONG: {"fcfs": [], "laps": []},
    }
    for name in ("a.svg", "b.svg"):
        distributions(curves, "t", tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert (tmp_path / "a.svg").stat().st_size < 100_000
