"""Benchmark of groups: loads, servers and figures."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence

import pytest
from laps_plan.profile import Profile
from laps_plan.sim.metrics import lone_s
from laps_plan.traffic.job import THRESHOLD, Job

from benchmark.fidelity import ranks
from benchmark.fidelity.compare import Accuracy
from benchmark.fidelity.ranks import CHUNK, CONTEXT, LOADS, POOL, PROFILE, Load, servers_of
from benchmark.load.prompts import HELD, Homes, SessionPrompts, to_rank
from benchmark.rig.variants import LAPS, SPF

AGENTS = LOADS["agents"].jobs(1.33, 5.0, 250.0, "1/0")


def total(jobs: Sequence[Job]) -> int:
    """Return the tokens that a server needs to keep the whole histories of these jobs."""
    longest: dict[int, int] = {}
    for job in jobs:
        longest[job.stream] = max(longest.get(job.stream, 0), job.cached + job.new)
    return sum(longest.values())


def test_mix_load_is_deterministic_with_expected_long_share() -> None:
    found = LOADS["mix"].jobs(1000.0, 20.0, 40.0, "1/0")
    assert found == LOADS["mix"].jobs(1000.0, 20.0, 40.0, "1/0")
    long = sum(job.new > THRESHOLD for job in found) / len(found)
    assert 0.07 < long < 0.15
    assert 1500 < len(found) < 2500


def test_agent_turns_follow_answers_and_scale_with_slowness() -> None:
    once = LOADS["agents"].jobs(1.33, 1.0, 50.0, "1/0")
    assert [(job.new, job.cached, job.after) for job in once] == [(job.new, job.cached, job.after) for job in AGENTS]
    assert [5 * job.at_s for job in once] == pytest.approx([job.at_s for job in AGENTS])
    assert [5 * job.pause_s for job in once] == pytest.approx([job.pause_s for job in AGENTS])
    assert all(job.at_s <= 250.0 for job in AGENTS)
    for seed in range(4):
        found = len(LOADS["agents"].jobs(1.33, 1.0, 50.0, f"{seed}/0"))
        assert 1.33 * 50 <= found < 1.33 * 50 + 11, "as many as the rate says"
    followers = [job for job in AGENTS if job.after is not None]
    assert len(followers) > len(AGENTS) / 3
    assert all(job.after is not None and AGENTS[job.after].stream == job.stream for job in followers)
    assert max(job.cached + job.new for job in AGENTS) < CONTEXT


def test_kv_pools_hold_all_histories_of_round() -> None:
    assert total([Job(0.0, 5, 100, 1), Job(1.0, 7, 50, 1), Job(0.0, 3, stream=2)]) == 108
    assert total(AGENTS) < 4 * POOL


def test_turn_shares_only_its_cached_tokens_with_earlier_turns() -> None:
    prompts = SessionPrompts((3, 2000), 1, 1 << 17, reuse=True, prefill_only=True)
    jobs = [
        Job(0.0, 300, 1000, 1, continues_stream=True),
        Job(0.0, 40, 1000, 2, continues_stream=True),
        Job(1.0, 50, 1290, 1, continues_stream=True, after=0),
        Job(2.0, 60, 400, 1, continues_stream=True, after=2),
        Job(3.0, 70, 1340, 1, continues_stream=True, after=3),
    ]
    paths = prompts.paths(jobs, 5)
    assert [len(path) for path in paths] == [job.cached + job.new for job in jobs]
    for i, (path, job) in enumerate(zip(paths, jobs, strict=True)):
        shared = [_shared(path, earlier) for earlier in paths[:i]]
        if job.after is not None:
            assert job.cached <= max(shared) < job.cached + 4, "the next tokens are equal by chance alone"
        else:
            assert max(shared, default=0) < 4
    sent = [json.loads(raw.split(b"\r\n\r\n", 1)[1]) for raw in prompts.bodies(jobs, 5)]
    assert [body["input_ids"] for body in sent] == [path.tolist() for path in paths]
    held = [body["sampling_params"].get("custom_params", {}).get(HELD) for body in sent]
    assert held == [1000, 1000, None, None, None], "what sessions begin with is in the cache"


def _shared(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_sessions_keep_dp_rank_and_start_on_least_loaded() -> None:
    homes = Homes(3)
    raw = SessionPrompts((3, 2000), 1, 4096, reuse=True, prefill_only=True).bodies([Job(0.0, 5)], 1)[0]

    def sent(job: Job) -> tuple[int, Callable[[], None]]:
        whole, done = homes(job, raw)
        head, body = whole.split(b"\r\n\r\n")
        assert int(head.rsplit(b" ", 1)[1]) == len(body)
        assert json.loads(body)["input_ids"] == json.loads(raw.split(b"\r\n\r\n")[1])["input_ids"]
        return int(json.loads(body)["routed_dp_rank"]), done

    def turn(session: int, new: int) -> Job:
        return Job(0.0, new, stream=session, continues_stream=True)

    first, done = sent(turn(1, 500))
    assert [first, sent(turn(2, 100))[0], sent(turn(3, 50))[0]] == [0, 1, 2]
    assert sent(turn(1, 10))[0] == 0
    assert sent(turn(4, 10))[0] == 2
    done()
    assert sent(turn(5, 10))[0] == 0, "it has 10 tokens under way, the others 100 and 60"


def test_dp_rank_is_written_into_request() -> None:
    whole = to_rank(b'POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 7\r\n\r\n{"a":1}', 12)
    assert whole == b'POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 27\r\n\r\n{"a":1,"routed_dp_rank":12}'


@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
def test_chunk_per_dp_rank_is_independent_of_rank_count(load: Load) -> None:
    for count in (2, 8):
        stock, laps = servers_of(load, count, 1.0)
        assert (stock.stock, laps.stock) == (True, False)
        sizes = [int(v.args[v.args.index("--chunked-prefill-size") + 1]) for v in (stock, laps)]
        assert sizes == [count * load.chunk, count * CHUNK]


def test_slowdown_is_relative_to_lone_time_in_group() -> None:
    profile = Profile.load(PROFILE).with_ranks(4).stretched(2.0)
    jobs = [Job(0.0, 100, 50_000), Job(0.0, 5000)]
    alone = [float(lone_s(profile, job.new, job.cached, CHUNK)) for job in jobs]
    rounds = {name: [{"ttft": [3.0 * t for t in alone], "ended_s": 10.0}] for name in (SPF, LAPS)}
    seen = ranks.simulator(LOADS["agents"], profile).compare([jobs], rounds, 1).measured
    (found,) = seen.rounds[LAPS]
    assert found["mean slowdown"] == pytest.approx(3.0)
    assert (found["short P90"], found["long P90"]) == pytest.approx((3.0 * alone[0], 3.0 * alone[1]))
    assert found["tokens/s"] == 510.0


def test_simulator_runs_all_jobs_and_reports_bars() -> None:
    load, jobs = LOADS["agents"], AGENTS[:30]
    profile = Profile.load(PROFILE).with_ranks(4).stretched(5.0)
    simulator = ranks.simulator(load, profile)
    records = {name: simulator.run(name, jobs, 1).record for name in (SPF, LAPS)}
    for record in records.values():
        assert len(record) == len(jobs)
        assert statistics.fmean(record.ttft) > 0.27, "the smallest step takes so long"
    rounds = {name: [{"ttft": [1.0] * len(jobs), "ended_s": 100.0}] for name in records}
    seen = simulator.compare([jobs], rounds, 1)
    piece = ranks.piece(load, Accuracy(seen.measured, seen.measured), "text", 1, {})
    ours = [f for f in piece.figures if f.name.endswith(f"{LAPS} / {SPF}")]
    assert [f.bar for f in ours] == ["<= 0.4", "<= 0.58", "<= 0.36", "<= 1", ">= 1"]
    ratios = [f for f in piece.figures if f.name.endswith("simulated / emulated")]
    assert ratios
    assert all(f.value == 1.0 and f.met for f in ratios)
