from __future__ import annotations

from typing import Any

import msgspec
import pytest
from laps_core.histogram import LengthCount
from laps_core.protocol import read_status
from sglang_laps.telemetry.status import PERIOD_S, SHARE, Series, merge


def rank(depth: int, oldest: float, busy: float) -> dict[str, Any]:
    queue = {"depth": depth, "waiting_tokens": 10 * depth, "oldest_wait_s": oldest}
    return {
        "enabled": True,
        "queues": {"short": queue, "long": queue},
        "totals": {"short": {"batches": depth}, "long": {"batches": 1}},
        "load": {"backlog_tokens": depth, "slo_deviation": oldest, "busy_share": busy},
    }


def test_merge_keeps_status_of_single_dp_rank() -> None:
    assert merge([rank(3, 0.5, 0.1)]) == rank(3, 0.5, 0.1)


def test_merge_sums_counters_and_keeps_oldest_wait() -> None:
    both = merge([rank(1, 0.5, 0.0), rank(2, 0.25, 1.0)])
    assert both["queues"]["short"] == {"depth": 3, "waiting_tokens": 30, "oldest_wait_s": 0.5}
    assert both["totals"] == {"short": {"batches": 3}, "long": {"batches": 2}}
    assert both["load"] == {"backlog_tokens": 3, "slo_deviation": 0.5, "busy_share": 0.5}
    assert len(both["ranks"]) == 2


def test_merge_sorts_status_by_dp_rank() -> None:
    told = merge([{**rank(n, 0.0, 0.0), "dp_rank": n} for n in (2, 0, 1)])
    assert [r["dp_rank"] for r in told["ranks"]] == [0, 1, 2]
    found = read_status(told)
    assert isinstance(found.ranks, list)
    assert [(r.dp_rank, r.load and r.load.backlog_tokens) for r in found.ranks] == [(0, 0.0), (1, 1.0), (2, 2.0)]


def test_merge_sums_length_counts_of_dp_ranks() -> None:
    one, other = LengthCount(), LengthCount()
    one.add(100, 5)
    other.add(100, 7)
    other.add(3000, 0)
    told = [{**rank(1, 0.0, 0.0), "lengths": msgspec.to_builtins(c.to_lengths(60.0))} for c in (one, other)]
    lengths = read_status(merge(told)).lengths
    assert lengths is not None
    assert [(b.requests, b.new_tokens, b.cached_tokens) for b in lengths.buckets] == [(2, 200, 12), (1, 3000, 0)]
    assert lengths.seconds == 60.0


def test_merge_of_no_status_reports_laps_disabled() -> None:
    assert merge([])["enabled"] is False


def test_merge_keeps_reason_of_disabled_dp_ranks() -> None:
    off = {"enabled": False, "reason": "--disaggregation-mode is decode"}
    assert merge([off, off]) == off


def test_merge_sums_decode_steps_and_keeps_slowest_times() -> None:
    def decode(steps: int, p99: float | None) -> dict[str, Any]:
        counts = {"streams": steps, "steps": steps, "steps_in_pauses": 1, "busy_s": 0.5, "abandoned_passes": steps}
        counts["steps_carried"] = 2 * steps
        return {"target_ms": 50.0, "step_ms": p99, **counts, "tbt_ms": {"p99": p99}}

    told = merge([{**rank(n, 0.0, 0.0), "dp_rank": n, "decode": decode(n, ms)} for n, ms in ((1, None), (2, 40.0))])
    assert told["decode"] == {**decode(3, 40.0), "steps_in_pauses": 2, "busy_s": 1.0}


def test_merge_keeps_missing_decode_target() -> None:
    decode = dict.fromkeys(("streams", "steps", "steps_in_pauses", "steps_carried", "busy_s", "abandoned_passes"), 0)
    told = merge([{**rank(0, 0.0, 0.0), "decode": {"target_ms": None, "step_ms": None, **decode, "tbt_ms": {}}}] * 2)
    assert told["decode"]["target_ms"] is None


@pytest.mark.parametrize(("took_s", "updates"), [(0.0, 25), (0.125, 2)])
def test_long_snapshots_are_taken_less_often(took_s: float, updates: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot visits each waiting request."""
    now, shown = 100.0, list[float]()
    series: Any = Series.__new__(Series)
    series._tells_s, series._counters = 0.0, []

    def show(_: dict[str, Any]) -> None:
        nonlocal now
        now += took_s
        shown.append(now)

    series.show = show
    monkeypatch.setattr("time.perf_counter", lambda: now)
    for _ in range(200):
        series.update(now, dict, {})
        now += PERIOD_S / 8
    assert updates <= len(shown) <= updates + 2
    assert took_s * len(shown) <= SHARE * (now - 100.0) + 2 * took_s
