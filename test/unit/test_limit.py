"""The oracle that policies are compared with, and the geometry of the comparison."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from laps_plan.profile import Profile
from laps_plan.sim import oracle
from laps_plan.sim.metrics import Outcome, lone_s
from laps_plan.sim.oracle import Aim
from laps_plan.sim.variants import VARIANTS, run
from laps_plan.traffic.job import Job
from laps_plan.traffic.lengths import uniform
from laps_plan.traffic.streams import Open, Sessions, Stream, Trace
from simulated import CHUNK, HOST, MIX, PROFILE

from benchmark import limit
from benchmark.results.frontier import distance, envelope, shared
from benchmark.results.piece import Piece

SLICE_S = 4e-3
MODES = {"slices": SLICE_S, "free": None}
AIMS = {
    "least work": Aim(),
    "shorts": Aim(boost=64.0, ahead=16.0),
    "longs": Aim(boost=0.03),
    "slowdown": Aim(power=1.0),
    "gap": Aim(boost=16.0, gap_s=0.05),
    "given up": Aim(boost=4.0, late_s=(0.02, 0.5)),
}


def ask(aim: Aim, load: Stream, slice_s: float | None, profile: Profile = PROFILE) -> Outcome:
    return oracle.run(aim, load, profile, chunk=CHUNK, slice_s=slice_s, threshold=256)


def mean(outcome: Outcome) -> float:
    return float(np.mean(outcome.record.ttft))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("aim", AIMS)
@pytest.mark.parametrize("profile", [PROFILE, HOST], ids=lambda p: p.name)
def test_every_request_is_answered_once_and_every_token_computed(profile: Profile, aim: str, mode: str) -> None:
    load = Open(MIX, 30.0, 1500, seed=3)
    outcome = ask(AIMS[aim], load, MODES[mode], profile)
    assert sorted(outcome.record.new) == sorted(job.new for job in load.arrivals())
    assert outcome.left == 0
    assert min(outcome.record.wait) >= 0.0
    # Nobody is faster than alone on a device that is as quick as it ever is.
    quickest = min(profile.spread, default=1.0)
    alone = lone_s(profile, list(outcome.record.new), list(outcome.record.cached), CHUNK)
    assert np.all(np.asarray(outcome.record.ttft) >= 0.9 * quickest * alone)
    assert 0.0 < outcome.utilisation <= 1.0


@pytest.mark.parametrize("mode", MODES)
def test_conversations_come_to_their_end(mode: str) -> None:
    outcome = ask(Aim(boost=16.0), Sessions(MIX, 20, 400, seed=2, think_s=0.1), MODES[mode])
    assert len(outcome.record) == outcome.sent == 400


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("low", "high"), [(8, 256), (300, 6000)], ids=["short", "long"])
def test_of_one_class_its_mean_is_no_worse_than_that_of_shortest_first(low: int, high: int, mode: str) -> None:
    rate = 0.8 / float(np.mean(lone_s(PROFILE, [low, high], 0, CHUNK)))
    load = Open(uniform(low, high), rate, 2000, seed=4)
    theirs = run(VARIANTS["shortest-prefill-first"], load, PROFILE, chunk=CHUNK)
    # A step costs those too who are still to come: it may be best to pause for nobody.
    assert min(mean(ask(aim, load, MODES[mode])) for aim in (Aim(), Aim(gap_s=1.0))) <= mean(theirs)


@pytest.mark.parametrize("mode", MODES)
def test_it_stands_between_all_policies_and_what_cannot_be(mode: str) -> None:
    for seed in range(3):
        load = Open(MIX, 12.0, 1500, seed)
        mine = mean(ask(Aim(), load, MODES[mode]))
        policies = [mean(run(VARIANTS[name], load, PROFILE, chunk=CHUNK)) for name in limit.POLICIES]
        assert mine < min(policies)


def test_a_short_request_pauses_a_long_one_which_loses_no_more_than_that_step() -> None:
    jobs = [Job(0.0, 2048), Job(0.0201, 64)]
    alone_long, alone_short = (float(lone_s(PROFILE, job.new, 0, CHUNK)) for job in jobs)
    for slice_s, late_s in ((None, 1e-6), (SLICE_S, SLICE_S)):
        short, long = ask(Aim(boost=4.0), Trace(jobs), slice_s).record.ttft
        assert alone_short <= short <= alone_short + late_s + 1e-6
        assert long == pytest.approx(alone_long + alone_short, abs=1e-4)


def test_requests_that_wait_share_a_step_rather_than_pay_for_two() -> None:
    jobs = [Job(0.0, 200), *(Job(0.001, 100) for _ in range(10))]
    assert ask(Aim(ahead=2.0), Trace(jobs), SLICE_S).batches <= 3


def test_a_request_that_is_given_up_goes_behind_those_that_can_be_in_time() -> None:
    jobs = [Job(0.0, 2000), *(Job(0.001 + i * 1e-4, 1500) for i in range(6))]

    def in_time(aim: Aim) -> int:
        return sum(t <= 0.2 for t in ask(aim, Trace(jobs), SLICE_S).record.ttft)

    assert in_time(Aim(late_s=(math.inf, 0.2))) >= in_time(Aim())


def test_of_points_that_others_beat_the_frontier_holds_none() -> None:
    assert envelope([(2.0, 2.0), (1.0, 4.0), (3.0, 2.0), (1.0, 5.0), (4.0, 1.0), (2.0, 2.0)]) == [
        (1.0, 4.0), (2.0, 2.0), (4.0, 1.0),
    ]  # fmt: skip
    assert envelope([]) == []


def test_distance_is_how_much_larger_both_are_on_average_than_at_the_best_compromise() -> None:
    frontier = [(1.0, 9.0), (2.0, 2.0), (9.0, 1.0)]
    assert distance((2.0, 2.0), frontier) == 0.0
    assert distance((2.0 * math.e, 2.0 * math.e**3), frontier) == pytest.approx(2.0)
    assert distance((1.0, 9.0), frontier) == pytest.approx(math.log(1.5)), "much of one for little of the other"
    for point in ((3.0, 5.0), (1.0, 9.0)):
        assert distance(point, frontier) >= shared(point, frontier)


def test_both_at_once_asks_for_the_smaller_of_the_two() -> None:
    frontier = [(1.0, 4.0), (4.0, 1.0)]
    assert shared((10.0, 4.0), frontier) == pytest.approx(math.log(2.5))
    assert shared((1.0, 4.0), frontier) == 0.0
    assert shared((2.0 * math.e, 4.0 * math.e), frontier) == pytest.approx(1.0)


def test_the_study_leaves_a_piece_with_a_table_and_a_picture_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--loads", "azure", "--seeds", "1", "--requests", "100", "--utilisations", "0.7", "--out", str(tmp_path)]
    assert limit.main(argv) == 0
    piece = Piece.read(tmp_path)
    assert (tmp_path / "azure.svg").stat().st_size > 0
    assert list(piece.pictures) == ["azure.svg"]
    assert [row[0] for row in piece.tables[0].rows] == list(limit.POLICIES)
    assert [f.bar for f in piece.figures] == ["<= 0.15", ""]
    frontier = piece.data["azure"]["0.7"]["frontiers"]
    for x, y, _ in (seen.values() for seen in piece.data["azure"]["0.7"]["policies"].values()):
        assert any(a <= x and b <= y for a, b in frontier[limit.SLICES])
    assert "azure at 70%" in capsys.readouterr().out


@pytest.mark.parametrize("wrong", [["--seeds", "0"], ["--requests", "1"], ["--utilisations", "0"]])
def test_a_study_of_nothing_is_refused(wrong: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        limit.main([*wrong, "--out", str(tmp_path / "none")])
    assert refused.value.code == 2
    assert capsys.readouterr().err.strip().splitlines()[-1].startswith("python -m benchmark.limit: ")
    assert not (tmp_path / "none").exists()
