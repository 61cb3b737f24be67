"""Answers of laps-plan for servers that prefill and decode."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from laps_core.latency.step import StepShape
from laps_plan.plan import whole
from laps_plan.plan.colocated import SAME, Against, Answer
from laps_plan.plan.command import main
from laps_plan.plan.figures import Change
from laps_plan.plan.whole import DEFAULT, Question, Trials
from laps_plan.profile import Profile
from laps_plan.sim.serving import LAPS, Answers, Serving, serve
from laps_plan.traffic import mixed
from laps_plan.traffic.files import TOKEN_S, read
from laps_plan.traffic.given import Traffic, poisson
from laps_plan.traffic.job import Job
from laps_plan.traffic.streams import Trace

MIX = "80% uniform:16-128, 20% log:1024-8192"
QUESTION = Question(Profile.load("h200-qwen3-8b"), 1, 0.4, 4.0, 0.1)


def traffic(requests: int = 300, rate: float = 10.0) -> Traffic:
    given = poisson(mixed.by_hand(MIX), requests, MIX, rate=rate)
    return whole.with_answer_lengths(given, mixed.by_hand("100% uniform:20-80"), 0)


def test_colocated_plan_reports_policies_and_highest_rates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--mix", MIX, "--requests", "200", "--load", "0.5", "--colocated", "--answers", "100% fixed:40"]
    assert main([*args, "--out", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    for said in (
        "Side by side",
        "best of stock",
        "interval 1",
        "mixed",
        "Two colocated servers with LAPS",
        "1 prefill",
    ):
        assert said in told
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert len(plan["side_by_side"]) == 3 + len(whole.stock())
    for side in plan["side_by_side"]:
        assert 0.0 < side["tbt_s"]["p50"] <= side["tbt_s"]["p99"] <= side["tbt_s"]["longest"]
        assert 0.0 <= side["in_time"] <= 1.0
    assert plan["highest_rates"]["devices"] == 2
    assert len(plan["highest_rates"]["cases"]) == 4
    assert plan["verdict"][2] in told
    ratio = plan["best_of_stock"]["short P90"]["ratio"]
    laps, *_ = plan["side_by_side"]
    rival = next(s for s in plan["side_by_side"] if s["setup"] == plan["best_of_stock"]["short P90"]["setup"])
    assert ratio == pytest.approx(laps["short_s"]["p90"] / rival["short_s"]["p90"])
    assert rival["tbt_s"]["p99"] <= laps["tbt_s"]["p99"]


def test_colocated_plan_of_one_class_is_valid_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--mix", "100% uniform:16-128", "--requests", "80", "--load", "0.5", "--colocated"]
    assert main([*args, "--answers", "100% fixed:10", "--out", str(tmp_path)]) == 0
    assert "nan" not in capsys.readouterr().out.split()
    assert "NaN" not in (tmp_path / "plan.json").read_text()


def test_profile_without_decode_steps_is_rejected_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--mix", MIX, "--colocated", "--profile", "cpu", "--out", str(tmp_path / "plan")]) == 2
    told = capsys.readouterr()
    assert told.err == "laps-plan: profile cpu does not say how long decode steps take\n"
    assert not told.out


def test_stock_rivals_are_limited_by_tbt_of_laps() -> None:
    trials = Trials(QUESTION, traffic(rate=20.0))
    laps = trials.row(Serving(LAPS))
    small, large = trials.row(Serving("fcfs", 512, interval=1)), trials.row(DEFAULT)
    assert whole.stock_as_smooth([laps, small, large], laps) == [small]
    # If every setting makes streams wait longer, the one with the shortest waits.
    quick = replace(laps, tbt={**laps.tbt, "p99": 1e-3})
    assert whole.stock_as_smooth([laps, small, large], quick) == [small]
    assert whole.best([small, large], "long P90") == min(small, large, key=lambda r: r.long["p90"])
    assert whole.best([small, large], "answers/s") == max(small, large, key=lambda r: r.rate)


def test_laps_is_not_recommended_if_stock_serves_more() -> None:
    trials = Trials(QUESTION, traffic(600, rate=20.0))
    laps, rival = trials.row(Serving(LAPS)), trials.row(Serving("fcfs", 1024, interval=1))
    changes = {figure: (rival, Change.of(laps.parts, rival.parts)) for figure in whole.FIGURES}

    def answer(most: float) -> Answer:
        rates = {"laps": (laps.serving, 10.0), "stock": (rival.serving, most), "apart": (rival.serving, 0.0)}
        return Answer(trials, [laps, rival], laps, changes, 2, rates, [])

    assert answer(10.0).recommended
    assert not answer(11.0).recommended
    late = replace(rival, in_time=rival.in_time + 1.0)
    changes["in time"] = late, changes["in time"][1]
    assert not answer(10.0).recommended


def test_highest_rate_follows_devices_and_objectives() -> None:
    trials = Trials(QUESTION, traffic(400), search=200)
    one, two = (trials.find_highest_rate(QUESTION.laps(), QUESTION, n) for n in (1, 2))
    assert 1.6 * one < two < 2.6 * one
    assert trials.find_highest_rate(QUESTION.laps(), replace(QUESTION, tbt_s=1e-3), 1) == 0.0
    assert trials.find_highest_rate(QUESTION.laps(), replace(QUESTION, kv_tokens=1000), 1) == 0.0
    assert trials.find_highest_rate(DEFAULT, replace(QUESTION, tbt_s=0.03), 1) <= one


def test_search_for_rate_lasts_until_answers_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    lasted: list[float] = []

    def watch(serving: Serving, trace: Trace, *args: Any, **more: Any) -> Answers:
        lasted.append(trace.rows[-1].at_s - trace.rows[0].at_s)
        return serve(serving, trace, *args, **more)

    monkeypatch.setattr(whole, "serve", watch)
    mean = sum(job.output for job in traffic(1000).jobs) / 1000
    Trials(QUESTION, traffic(1000), search=50).find_highest_rate(DEFAULT, QUESTION, 1)
    assert len(lasted) == 2 + whole.STEPS
    assert min(lasted) > 0.9 * whole.SPAN * QUESTION.tbt_s * mean


def test_sustained_rate_is_known_and_not_exceeded() -> None:
    one = [Job(0.0, 1000, output=101)]
    profile = QUESTION.profile
    coefficients = profile.coefficients
    tokens_s = coefficients.seconds(StepShape.of([(1000, 0)])) - coefficients.fixed
    for streams, q in ((100, replace(QUESTION, kv_tokens=105_100)), (1, replace(QUESTION, kv_tokens=1051))):
        each_s = profile.decode_s(streams, streams * 1050) / streams
        assert whole.sustained(q, one) == pytest.approx(1 / (tokens_s + 100 * each_s), rel=0.01)
    assert whole.sustained(replace(QUESTION, kv_tokens=900), one) == 0.0
    assert whole.sustained(QUESTION, [Job(0.0, 1000, output=1)]) == pytest.approx(1 / tokens_s, rel=0.01)
    jobs = traffic(600, 1000.0).jobs
    for serving in (DEFAULT, Serving("shortest-prefill-first", 2048, mixed=True), QUESTION.laps()):
        assert serve(serving, Trace(jobs), profile).rate < whole.sustained(replace(QUESTION, tbt_s=1.0), jobs)


def test_prefill_server_count_follows_prefill_work() -> None:
    trials = Trials(QUESTION, traffic())
    prompt, answer = whole.device_s(QUESTION.profile, trials.traffic.jobs)
    assert prompt > 2.0 * answer
    assert list(whole.splits(trials, trials.traffic.jobs, 2)) == [1]
    four = list(whole.splits(trials, trials.traffic.jobs, 4))
    assert four[0] <= 4 * prompt / (prompt + answer)
    assert set(four) <= {1, 2, 3}


@pytest.mark.parametrize(
    ("laps", "apart", "word"), [(20.0, 10.0, "better"), (10.0, 20.0, "not better"), (10.0, 10.1, "as good")]
)
def test_similar_rates_are_called_as_good(laps: float, apart: float, word: str) -> None:
    assert Against("", laps, apart, 1).word.startswith(word)
    assert Against("", 1.0, 0.0, 1).ratio > 1.0 + SAME
    assert Against("", 0.0, 0.0, 1).ratio == 1.0


def test_answer_lengths_are_read_from_file_or_drawn(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("arrival_ms,new_tokens,output_tokens\n0,100,7\n10,200,\n")
    known = whole.with_answer_lengths(read(path), mixed.by_hand("100% fixed:50"), 0)
    assert [j.output for j in known.jobs] == [7, 1]
    path.write_text("arrival_ms,new_tokens\n0,100\n10,200\n")
    assert [j.output for j in whole.with_answer_lengths(read(path), mixed.by_hand("100% fixed:50"), 0).jobs] == [50, 50]


def test_known_answer_lengths_remove_answer_time_from_pause(tmp_path: Path) -> None:
    path = tmp_path / "s.csv"
    head = "session,t_ms,think_ms,new_tokens,cached_tokens,output_tokens\n"
    path.write_text(head + "a,0,0,100,0,50\na,9000,2000,10,150,5\n")
    given = read(path)
    assert given.jobs[-1].pause_s == pytest.approx(2.0 + TOKEN_S * 50)
    assert whole.with_answer_lengths(given, mixed.by_hand("100% fixed:1"), 0).jobs[-1].pause_s == pytest.approx(2.0)
