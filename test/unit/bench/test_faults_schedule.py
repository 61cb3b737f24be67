"""Faults and actions of a campaign, which follow from its seed."""

from __future__ import annotations

import itertools
import json
from collections import Counter

import pytest
from faults import prompts, schedule


@pytest.mark.parametrize("lane", schedule.LANES)
def test_round_has_every_fault_of_lane_once(lane: str) -> None:
    kinds = schedule.LANES[lane]
    for seed in range(5):
        some = list(itertools.islice(schedule.faults(seed, lane), 3 * len(kinds)))
        for i in range(0, len(some), len(kinds)):
            assert {f.kind for f in some[i : i + len(kinds)]} == set(kinds)
        for f in some:
            low, high = kinds[f.kind]
            assert low <= f.length_s <= high
            assert schedule.GAP_S[lane][0] <= f.gap_s <= schedule.GAP_S[lane][1]


def test_same_seed_gives_same_schedule_and_prompts() -> None:
    for make in (lambda s: schedule.faults(s, "decode"), schedule.actions):
        a, b, c = (list(itertools.islice(make(seed), 50)) for seed in (3, 3, 4))
        assert a == b != c
    assert prompts.make(3, 9, 3) == prompts.make(3, 9, 3)
    assert prompts.make(3, 9, 3) != prompts.make(4, 9, 3)


def test_action_frequencies_match_weights() -> None:
    record = Counter(d.kind for d in itertools.islice(schedule.actions(1), 5000))
    assert set(record) == set(schedule.ACTIONS)
    for kind, share in schedule.ACTIONS.items():
        assert record[kind] / 5000 == pytest.approx(share / sum(schedule.ACTIONS.values()), rel=0.4)


@pytest.mark.parametrize("only", schedule.KINDS)
def test_campaign_can_be_limited_to_one_class(only: str) -> None:
    kinds = {d.kind for d in itertools.islice(schedule.actions(1, only), 200)}
    inflicted = {
        (f.lane, f.kind) for lane in schedule.LANES for f in itertools.islice(schedule.faults(1, lane, only), 5)
    }
    if only in schedule.ACTIONS:
        assert kinds == {schedule.PLAIN, only}
        assert not inflicted
    else:
        assert kinds == {schedule.PLAIN}
        assert {kind for _, kind in inflicted} == {only}
    assert schedule.all_faults_inflicted(inflicted, only)
    assert not schedule.all_faults_inflicted(inflicted)


def test_prompts_cover_all_routes_and_both_lengths() -> None:
    made = prompts.make(1, 60, 30)
    assert [len(json.dumps(p.body)) > 700 for p in made] == [False] * 60 + [True] * 30
    assert {p.route for p in made[:60]} == {p.route for p in made[60:]} == set(prompts.ROUTES)
    assert all("stream" not in p.body for p in made)
