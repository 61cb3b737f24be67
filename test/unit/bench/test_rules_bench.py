"""Benchmark of each rule's worth: removal and restoration of rules, and ratios that count as moved."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from laps_core.config import LapsConfig
from laps_core.policy import fairness, preemption
from laps_core.policy.types import Waiting
from laps_plan.profile import Profile
from laps_plan.traffic.lengths import fixed

from benchmark.rig.model import REPO
from benchmark.sim import loads
from benchmark.sim.loads import FAR, LATER_S, LOADS, NEAR, UNEVEN, Loop, Pause
from benchmark.sim.rules import (
    HEADS,
    LITTLE,
    Case,
    Effect,
    Result,
    cell,
    effects,
    largest,
    matrix,
    raw,
    simulated,
    summary,
)
from benchmark.sim.without import ALL, RULES, Rule, fills, patch

SEEN = dict(zip((*HEADS, LITTLE), (0.1, 1.0, 0.2, 2.0, 50.0, math.nan, math.nan), strict=True))
PLACE = Case("h200-qwen3-8b", "mix 50%")


def test_taken_out_restores_rule_on_exit() -> None:
    rule = Rule("", "", patches=[patch(fairness, "SAVED", 1), patch(preemption, "DEPTH", 0)])
    before = fairness.SAVED, preemption.DEPTH
    with rule.taken_out():
        assert (fairness.SAVED, preemption.DEPTH) == (1, 0)
    assert before == (fairness.SAVED, preemption.DEPTH)
    with pytest.raises(KeyError), rule.taken_out():
        raise KeyError
    assert before == (fairness.SAVED, preemption.DEPTH)


def test_architecture_document_lists_every_rule() -> None:
    text = (REPO / "docs" / "ARCHITECTURE.md").read_text()
    table = text[text.index("| rule | where |") : text.index("Studied apart")]
    assert [line.split(" | ")[0].removeprefix("| ") for line in table.splitlines()[2:] if line] == [
        r.name for r in RULES
    ]


def test_rules_are_removable_and_have_unique_names() -> None:
    assert len({rule.name for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert rule.knobs or rule.patches
        LapsConfig(**rule.knobs)
        with rule.taken_out():
            pass


@pytest.mark.parametrize("name", ["mix 70%", "mix 90%, deadlines", "chat 2, near"])
def test_simulation_is_reproducible_and_changes_without_rule(name: str) -> None:
    profile, load = Profile.load("h200-qwen3-8b"), replace(LOADS[name], requests=200)
    rule = next(r for r in RULES if r.name == ("window" if load.clients else "slices"))

    def seen(without: Rule | None) -> Result:
        return simulated(load, profile, without, seed=7)

    today = seen(None)
    assert seen(rule) != today
    assert repr(seen(None)) == repr(today), "it is back"
    assert math.isnan(today["in_time"]) != load.deadlines
    assert load.clients == 0 or today[LITTLE] == pytest.approx(1.0, abs=0.05)


def test_spill_changes_results_of_divided_fleet() -> None:
    profile, load = Profile.load("h200-qwen3-8b"), replace(LOADS["azure 70%, divided"], requests=100)
    (spill,) = (r for r in ALL if r.name == "spill")
    assert simulated(load, profile, spill, seed=7) != simulated(load, profile, None, seed=7)


def test_effect_moves_above_3_percent_in_one_direction() -> None:
    assert Effect(1.04, True).moved
    assert Effect(1 / 1.04, True).moved
    assert not Effect(1.02, True).moved
    assert not Effect(1.2, False).moved
    assert Effect.of([2.0, 8.0], [1.0, 2.0]) == (pytest.approx(math.sqrt(8.0)), True)
    assert Effect.of([2.0, 1.0], [1.0, 2.0]) == (1.0, False)
    assert Effect.of([2.0, 1.0], [1.0, 1.0]) == (pytest.approx(math.sqrt(2.0)), False)
    assert Effect.of([math.nan], [math.nan]) is None


def test_summary_shows_largest_effect_of_each_rule() -> None:
    slower = SEEN | {"short_p90_s": 0.3, "mean_s": 0.1, "requests_per_s": 50.5}
    by = effects([slower] * 2, [SEEN] * 2)
    assert "in_time" not in by
    assert cell(by) == "S 3.00 M 0.50"
    rules = [Rule("one", "less"), Rule("other", "more", bound="a wait")]
    found = {"one": {PLACE: by}, "other": {PLACE: effects([SEEN] * 2, [SEEN] * 2)}}
    top = largest(found["one"])
    assert top is not None
    assert top[:2] == (PLACE, "short_p90_s")
    assert summary(found, rules).rows == [
        ("one", "less", "short P90 x 3.00, mix 50%, 8b", "1 of 1", ""),
        ("other", "more", "none", "0 of 1", "a wait"),
    ]
    assert matrix(found, rules, PLACE.profile).rows == [("one", "S 3.00 M 0.50"), ("other", "")]
    assert raw(found, {PLACE: [SEEN]})["today"][0]["seeds"][0]["in_time"] is None


def test_filled_batch_holds_at_most_one_chunked_prompt() -> None:
    def item(tokens: int, *, started: bool = False) -> Waiting:
        return Waiting(tokens, 0, 0.0, started=started)

    def filled(*items: Waiting) -> list[int]:
        sizes: Any = None
        return fills(items, sizes, budget=100, waiting=0)

    assert filled(item(60), item(30), item(30), item(30)) == [0, 1, 2]
    assert filled(item(60, started=True), item(50), item(40)) == [0, 2]


def test_client_think_times_follow_given_distribution() -> None:
    for pause in (FAR, NEAR, UNEVEN):
        drawn = [pause.drawn((i + 0.5) / 10_000) for i in range(10_000)]
        assert sum(drawn) / len(drawn) == pytest.approx(pause.mean_s, rel=0.01)
    assert all(NEAR.low_s <= NEAR.drawn(u / 10) < NEAR.high_s for u in range(10))
    half = Pause(1.0, 2.0, later=0.5)
    assert half.drawn(0.25) == pytest.approx(LATER_S * math.log(2.0))
    assert half.drawn(0.75) == 1.5
    loop = Loop(fixed(10), 4, 8, 3, pause=NEAR)
    assert all(NEAR.low_s <= job.at_s <= NEAR.high_s for job in loop.arrivals())


@pytest.mark.parametrize("rule", ALL, ids=lambda rule: rule.name)
def test_each_rule_can_be_taken_out_of_simulation(rule: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    all_of_ranks = loads._of_ranks
    monkeypatch.setattr(loads, "_of_ranks", lambda *args: all_of_ranks(*args)[:100])
    fits = (one for one in LOADS.values() if one.kind == rule.kind and one.deadlines == rule.deadlines)
    profile = Profile.load("h200-deepseek-v3-dp8" if rule.kind == "group" else "h200-qwen3-8b")
    assert simulated(replace(next(fits), requests=200), profile, rule, seed=7)["mean_s"] > 0.0
