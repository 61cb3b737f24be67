"""Load of coding agents behind routers: the requests, and the share of them that a single cache would hold."""

from __future__ import annotations

import json

import pytest
from laps_plan.profile import Profile
from laps_plan.traffic.job import Job
from laps_plan.traffic.turns import Turn

from benchmark.load.connection import request
from benchmark.router.agents import SYSTEM_TOKENS, SYSTEMS, arrivals, kept_at_best, prompts, rebased, work_s

S, LONGEST = SYSTEM_TOKENS, 65536
PROFILE = Profile.load("h200-qwen3-8b")


def test_rebased_sessions_start_from_system_prompt() -> None:
    found = rebased([Turn(100, 40_000, 0.0), Turn(50, 40_100, 1.0), Turn(7, 39_000, 1.0)])
    assert [(t.new, t.cached) for t in found] == [(100, S), (50, S + 100), (7, S)]


@pytest.mark.parametrize("share", [0.4, 0.8])
def test_arrivals_offer_about_requested_load(share: float) -> None:
    offered = [work_s(arrivals(LONGEST, share, 4, 600.0, PROFILE, f"{i}"), PROFILE) / 4 / 600.0 for i in range(8)]
    # Sessions that start late end after the span.
    assert 0.7 * share < sum(offered) / len(offered) < 1.1 * share


def test_most_turns_follow_another_and_share_its_prompt_prefix() -> None:
    jobs = arrivals(LONGEST, 0.7, 4, 60.0, PROFILE, "1")
    sent = prompts(LONGEST, 1).bodies(jobs, 1)
    asked = [json.loads(raw.split(b"\r\n\r\n", 1)[1])["input_ids"] for raw in sent]
    followed = [i for i, job in enumerate(jobs) if job.after is not None]
    assert len(followed) > len(jobs) / 2
    for i in followed:
        before, common = asked[jobs[i].after or 0], min(jobs[i].cached, jobs[jobs[i].after or 0].cached)
        assert asked[i][:common] == before[:common]
        assert len(asked[i]) == jobs[i].cached + jobs[i].new <= LONGEST


def test_kept_at_best_sums_cached_tokens_of_single_cache() -> None:
    def job(stream: int, new: int, cached: int) -> Job:
        return Job(0.0, new, cached, stream, continues_stream=True)

    # Cached: nothing; the system prompt; the whole previous turn; of an equal turn all but the last token.
    jobs = [job(0, 100, S), job(SYSTEMS, 50, S), job(0, 10, S + 100), job(0, 10, S + 100)]
    assert kept_at_best(jobs) == 0 + S + (S + 100) + (S + 109)


def test_session_id_is_sent_in_routing_key_header() -> None:
    assert b"\r\nx-smg-routing-key: a\r\n" in request({}, headers={"x-smg-routing-key": "a"})
    assert b"routing" not in request({})
    raw = prompts(LONGEST, 1).bodies([Job(0.0, 5, stream=7)], 1, ("x-smg-routing-key", "session-0-"))[0]
    assert b"\r\nx-smg-routing-key: session-0-7\r\n" in raw
