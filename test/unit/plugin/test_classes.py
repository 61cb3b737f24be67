"""Classes of waiting requests: by the tokens that the prefix cache leaves, and after the builder's result."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from cores import Request, make_core
from laps_core.config import LapsConfig
from laps_core.deadline import REPLY_S
from laps_core.length import LONG, SHORT
from laps_core.policy.pacer import Pacer
from pacers import PROFILE
from sglang_laps.classes import Classes
from sglang_laps.core import LapsCore


def test_short_request_with_evicted_prefix_becomes_long() -> None:
    core = make_core().classes
    req: Any = Request("s", 1000)
    req.laps_tag.new_tokens, req.laps_tag.history = 40, 960
    req.laps_tag.looked = 2
    core.batches = 7
    assert not core.outgrown(req, 256)
    assert core.outgrown(req, 900)
    # Long until a batch has run: classified again at once it could become short, and be refused forever.
    assert (req.laps_tag.new_tokens, req.laps_tag.history, req.laps_tag.looked) == (900, 100, 7)
    assert core.class_of(req) is LONG


def test_unbuildable_short_request_waits_as_long_until_next_batch() -> None:
    core = make_core().classes
    req: Any = Request("s", 40)
    core.batches = 7
    core.make_long(req, 40)
    queue = [req]
    assert (core.views(queue).long, req.laps_tag.new_tokens) == (queue, 40)
    core.batches = 8
    assert core.views(queue).short == queue, "looked up again after a batch"


def test_prompt_length_basis_affects_class_but_not_planned_work() -> None:
    """A turn of 50 tokens on 30,000 cached tokens is long, but takes only as long as any 50 tokens."""
    times = SimpleNamespace(created_time=0.0, scheduler_recv_time=0.0)
    req: Any = SimpleNamespace(
        time_stats=times, sampling_params=SimpleNamespace(custom_params=None), seqlen=30_050, priority=None
    )
    config = LapsConfig(length_basis="prompt")
    classes = Classes(config, 256, lambda _: 30_000, lambda: 5.0)
    core = LapsCore(Pacer(config, chunk_tokens=512, layers=28, model=PROFILE.model()), classes)
    queues = core.view_queues([req], None)
    assert queues.long == [req]
    plan = core.decide(5.0, queues, None, frees_memory=False)
    assert plan.long.tokens == 50
    assert plan.long.layers == 0, "it is too small to be worth a pause"
    assert core.classes.seen([req], 6.0)[LONG][0].new_tokens == 50


def test_arrival_time_is_valid_shortly_after_boot() -> None:
    times = SimpleNamespace(created_time=0.0, scheduler_recv_time=4.75)
    params = SimpleNamespace(custom_params={"ttft_slo_ms": 60})
    req: Any = SimpleNamespace(time_stats=times, sampling_params=params, seqlen=40)
    assert Classes(LapsConfig(), 256, lambda _: 0, lambda: 5.0).class_of(req) is SHORT
    assert (req.laps_tag.arrival, req.laps_tag.slo_s) == (4.75, 0.06)


def test_default_deadline_follows_class_at_arrival() -> None:
    times = SimpleNamespace(created_time=0.0, scheduler_recv_time=4.0)
    cached = 0

    def request(tokens: int) -> Any:
        return SimpleNamespace(time_stats=times, sampling_params=SimpleNamespace(custom_params=None), seqlen=tokens)

    classes = Classes(LapsConfig(ttft_slo_ms=(400.0, 4000.0)), 256, lambda _: cached, lambda: 5.0)
    short, long = request(40), request(9000)
    assert [classes.class_of(r) for r in (short, long)] == [SHORT, LONG]
    assert [r.laps_tag.deadline_s for r in (short, long)] == [4.4 - REPLY_S, 8.0 - REPLY_S]
    cached, classes.batches = 8990, 1
    assert classes.views([short, long]).short == [short, long], "found in the cache meanwhile"
    assert long.laps_tag.deadline_s == 8.0 - REPLY_S


def test_cached_prefix_makes_request_short() -> None:
    times = SimpleNamespace(created_time=0.0, scheduler_recv_time=0.0)
    found = {"cached": 8990, "new": 0, "all of it": 9000}

    def request(rid: str) -> Any:
        params = SimpleNamespace(custom_params=None)
        return SimpleNamespace(rid=rid, time_stats=times, sampling_params=params, seqlen=9000)

    classes = Classes(LapsConfig(), 256, lambda r: found[r.rid], lambda: 5.0)
    queue = [request(rid) for rid in found]
    views = classes.views(queue)
    assert [r.rid for r in views.short] == ["cached", "all of it"]
    assert [r.laps_tag.new_tokens for r in queue] == [10, 9000, 1]
    classes.views(queue)
    counted = [(b.requests, b.new_tokens, b.cached_tokens) for b in classes.lengths.to_lengths(1.0).buckets]
    assert counted == [(1, 1, 8999), (1, 10, 8990), (1, 9000, 0)], "each once"
