"""Quotes of a server: requests from the queue to the first token, status, routes and metrics."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from cores import make_batch
from laps_core.config import LapsConfig
from laps_core.latency.model import LatencyModel
from laps_core.length import LONG, SHORT
from laps_core.policy.decode import Decode
from laps_core.policy.pacer import Pacer
from laps_core.policy.types import LongBatch, Plan
from laps_core.receipts.quote import Ask, QuoteState
from pacers import PROFILE
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang_laps.classes import Classes
from sglang_laps.flights import Part
from sglang_laps.http import quote_routes
from sglang_laps.telemetry.quotes import QuotedCore, states


class Clock:
    now = 10.0

    def __call__(self) -> float:
        return self.now


class WaitingRequest:
    """Waiting request that no round has classified yet."""

    laps_tag: Any

    def __init__(self, rid: str, tokens: int, came: float = 10.0) -> None:
        self.rid, self.seqlen, self.priority, self.prefix_len, self.extend_end = rid, tokens, None, 0, 0
        self.time_stats = SimpleNamespace(created_time=0.0, scheduler_recv_time=came)
        self.sampling_params = SimpleNamespace(custom_params=None)
        self.full_untruncated_fill_ids = range(tokens)
        self.to_finish: Any = None
        self.finished_reason: Any = None


def make_core(cached: int = 0) -> tuple[QuotedCore, Clock]:
    clock, config = Clock(), LapsConfig()
    pacer = Pacer(config, chunk_tokens=8192, layers=28, model=PROFILE.model())
    return QuotedCore(config, pacer, Classes(config, 256, lambda _: cached, clock), guaranteed=True, clock=clock), clock


def queue(*sizes: int) -> list[Any]:
    return [WaitingRequest(f"r{i}", n) for i, n in enumerate(sizes)]


def test_queued_request_is_quoted_and_judged_at_first_token() -> None:
    core, clock = make_core()
    reqs = queue(100, 5000)
    clock.now = 10.25
    queues = core.view_queues(reqs, None)
    short, long = (r.laps_tag.quoted for r in reqs)
    assert (short.cls, long.cls) == (SHORT, LONG)
    assert short.waited_s == 0.25
    assert short.bound_s is None
    assert long.bound_s > long.high_s > long.median_s > long.low_s > 0.25
    assert len(core.quoter.backlog) == 2
    flight = core.record_build(
        Part(SHORT, [reqs[0]]), make_batch(reqs[0]), Plan((SHORT,), (0,)), None, queues.begun, clock.now
    )
    assert len(core.quoter.backlog) == 1
    flight.started, flight.done = 10.25, 10.26
    clock.now = 10.0 + short.median_s
    core.record_result(flight, clock.now)
    assert core.quoter.counts[SHORT]["inside"] == 1
    assert core.quotes(clock.now)["quotes"]["outcomes"][SHORT] == {"inside": 1, "below": 0, "above": 0}


def test_quote_counts_decode_step_on_device() -> None:
    core, clock = make_core()
    decode = core.decode = Decode(None)
    decode.record_launch(9.0)
    decode.record_step(9.0, 9.02, streams=1, within=False)
    assert core.quotes(clock.now)["quote"]["left_s"] == 0.0
    decode.record_launch(clock.now)
    assert core.quotes(clock.now)["quote"]["left_s"] == pytest.approx(0.02)


def test_aborted_request_counts_no_outcome() -> None:
    core, clock = make_core()
    reqs = queue(100, 120)
    queues = core.view_queues(reqs, None)
    part = Part(SHORT, reqs)
    flight = core.record_build(part, make_batch(*reqs), Plan((SHORT,), (0, 1)), None, queues.begun, clock.now)
    reqs[0].to_finish = FINISH_ABORT()
    core.record_result(flight, 10.1)
    assert sum(core.quoter.counts[SHORT].values()) == 1


def test_prompt_in_progress_waits_with_remaining_work() -> None:
    core, _ = make_core()
    (req,) = reqs = queue(20_000)
    queues = core.view_queues(reqs, None)
    whole_s = sum(s.seconds for s in core.quoter.backlog.long)
    part = SimpleNamespace(reqs=[req], extend_lens=[8192], prefix_lens=[0], decoding_reqs=None)
    core.record_build(Part(LONG, reqs, whole=False), part, Plan((LONG,), long=LongBatch((0,))), req, queues.begun, 10.0)
    left_s = sum(s.seconds for s in core.quoter.backlog.long)
    assert 0.0 < left_s < whole_s


def test_aborted_requests_leave_backlog() -> None:
    core, _ = make_core()
    reqs = queue(*[100] * 20, 9000)
    core.view_queues(reqs, None)
    assert len(core.quoter.backlog) == 21
    core.view_queues(reqs[3:7], None)
    assert len(core.quoter.backlog) == 4
    assert core.quoter.backlog.short.requests == 4


def test_prefix_cache_hit_reduces_backlog_and_keeps_quote() -> None:
    found = [0]
    clock, config = Clock(), LapsConfig()
    pacer = Pacer(config, chunk_tokens=8192, layers=28, model=PROFILE.model())
    core = QuotedCore(config, pacer, Classes(config, 256, lambda _: found[0], clock), guaranteed=True, clock=clock)
    reqs = queue(9000)
    core.view_queues(reqs, None)
    first = reqs[0].laps_tag.quoted
    found[0], core.classes.batches = 8900, 1
    core.view_queues(reqs, None)
    assert core.quoter.backlog.short.tokens == 100
    assert reqs[0].laps_tag.quoted is first, "quoted once"


def test_retracted_request_waits_but_is_no_new_arrival() -> None:
    core, clock = make_core()
    reqs = queue(300)
    reqs[0].retraction_count = 1
    clock.now = 40.0
    for _ in range(3):
        core.classes.batches += 1
        core.view_queues(reqs, None)
    assert reqs[0].laps_tag.quoted is None
    state = core.quotes(clock.now)["quote"]
    assert (state["before_s"], state["long_shares"]) == (0.0, ())
    assert [n for _, n, _ in state["longs"]] == [1], "its work counts"


def test_request_queued_before_model_fits_is_not_quoted_later() -> None:
    core, clock = make_core()
    model, core.pacer.model = core.pacer.model, LatencyModel()
    reqs = queue(4000, 4000)
    core.view_queues(reqs, None)
    core.pacer.model, core.classes.batches = model, 1
    clock.now = 18.0
    core.view_queues(reqs, None)
    assert reqs[0].laps_tag.quoted is None
    state = core.quotes(clock.now)["quote"]
    assert (state["before_s"], state["long_shares"]) == (0.0, ())
    assert [n for _, n, _ in state["longs"]] == [2], "its work counts"


def status(*sizes: int) -> dict[str, Any]:
    core, clock = make_core(cached=40)
    core.view_queues(queue(*sizes), None)
    said = {"enabled": True, **core.quotes(clock.now)}
    sent: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(said))
    return sent


def test_status_contains_quote_state_and_typical_lengths() -> None:
    said = status(100, 100, 6000)
    state = msgspec.convert(said["quote"], QuoteState)
    assert (state.shorts, state.short_tokens, len(state.longs)) == (2, 120, 1)
    typical = said["quotes"]["typical"]
    assert (typical[SHORT]["new"], typical[SHORT]["cached"], typical[LONG]["new"]) == (60, 40, 5960)


def ask(said: dict[str, Any], rank: int | None = None, one: bool = True, **asked: int) -> tuple[int, Any]:
    code, body = quote_routes.answer(said, [Ask(**(asked or {"new": 100}))], rank, 0.04, one=one)
    return code, msgspec.json.decode(body)


def test_http_process_answers_quotes_from_status() -> None:
    code, one = ask(status(100), new=1200, cached=30_000)
    assert code == 200
    assert one["class"] == LONG
    assert 0.0 < one["low_ms"] <= one["ttft_ms"] <= one["high_ms"] <= one["bound_ms"]
    code, refused = ask({**status(100), "longest": 31_199}, new=1200, cached=30_000)
    assert (code, refused["error"]["message"]) == (400, "a prompt of 31200 tokens: the server takes at most 31199")
    assert ask({**status(100), "longest": 31_200}, new=1200, cached=30_000)[0] == 200
    code, many = ask(status(100), one=False)
    assert (code, len(many["quotes"]), many["age_s"]) == (200, 1, 0.04)


def test_quote_uses_slowest_or_requested_dp_rank() -> None:
    idle, busy = status(), status(*[20_000] * 5)
    both = {"enabled": True, **idle, "ranks": [idle, busy]}
    assert len(states(both)) == 2
    times = [ask(both, rank, new=50_000)[1]["ttft_ms"] for rank in (0, 1, None)]
    assert times[0] < times[1] == times[2]
    assert ask(both, 2)[0] == 400


def test_missing_quote_returns_503_with_reason() -> None:
    code, said = ask({"enabled": False, "reason": "--disaggregation-mode is decode"})
    assert code == 503
    assert "--disaggregation-mode is decode" in said["error"]["message"]
    assert ask({"enabled": True, "quote": None})[0] == 503


@pytest.mark.parametrize(
    ("query", "body", "why"),
    [
        ({}, None, "new"), ({"new": "0"}, None, ">= 1"), ({"new": "x"}, None, "int"),
        ({"new": "5", "old": "1"}, None, "old"),
        ({"new": "5", "cached": "-1"}, None, ">= 0"), ({"new": "5", "max_age_s": "y"}, None, "float"),
        ({}, b"{}", "array"), ({}, b"[{}]", "new"), ({}, b"[", "truncated"),
        ({}, msgspec.json.encode([{"new": 1}] * 1001), "at most 1000"),
    ],
)  # fmt: skip
def test_invalid_quote_queries_are_rejected(query: dict[str, str], body: bytes | None, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        quote_routes._read(query, body)


def test_quote_queries_are_parsed() -> None:
    assert quote_routes._read({"new": "7", "dp_rank": "1", "max_age_s": "0.5"}, None) == ([Ask(new=7)], 1, 0.5)
    assert quote_routes._read({}, b'[{"new": 7, "cached": 3}]') == ([Ask(new=7, cached=3)], None, 0.0)


SERIES = """
from prometheus_client import generate_latest
from sglang_laps.telemetry.status import Series
series = Series({"model_name": "m", "class": "of a user"})
series.show({})
for n in (3, 5):
    sides = {"inside": n, "below": 0, "above": 1}
    one = {"ttft_ms": 250.0, "high_ms": 500.0}
    series.show({"quotes": {"typical": {"long": one}, "outcomes": {"long": sides}, "beyond_bound": 0}})
print(generate_latest().decode())
"""


def test_quotes_are_exported_as_prometheus_series() -> None:
    text = subprocess.run([sys.executable, "-c", SERIES], capture_output=True, text=True, check=True).stdout
    assert 'sglang:laps_quote_seconds{class="long",model_name="m"} 0.25' in text
    assert 'sglang:laps_quote_high_seconds{class="long",model_name="m"} 0.5' in text
    assert 'sglang:laps_quote_outcomes_total{class="long",model_name="m",side="inside"} 5.0' in text
    assert 'sglang:laps_quote_outcomes_total{class="long",model_name="m",side="above"} 1.0' in text
    assert 'sglang:laps_quote_beyond_bound_total{model_name="m"} 0.0' in text
