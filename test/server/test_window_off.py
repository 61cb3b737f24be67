"""Window 0 gives the dual queue only; the adaptive window never holds the requests of a lone user."""

from __future__ import annotations

import asyncio

import pytest
from served import NO_PREFIX_CACHE, SAVED, SLOW_WINDOW, Prefill, ids, on, send_all
from sglang_laps import saved_model

pytestmark = on(NO_PREFIX_CACHE, SLOW_WINDOW)


def test_requests_one_at_a_time_never_wait(prefill: Prefill) -> None:
    before = prefill.get("/laps_status")["window"]
    for i in range(40):
        asyncio.run(send_all(prefill, [ids(i, 16 + 4 * i)]))
    after = prefill.get("/laps_status")["window"]
    # With a window of two seconds any hold would be counted in the last bucket.
    assert after["dispatched"]["window"] == before["dispatched"]["window"]
    assert after["waits_ms"][">50"] == before["waits_ms"][">50"]


def test_a_crowd_is_served(prefill: Prefill) -> None:
    for round_ in range(3):
        assert len(asyncio.run(send_all(prefill, [ids(100 * round_ + i, 30) for i in range(24)]))) == 24


def test_the_latency_model_is_saved_when_idle(prefill: Prefill) -> None:
    if prefill.setup is not SLOW_WINDOW:
        pytest.skip("no path was given")
    prefill.all_tokens_are_free()
    path = prefill.folder / SAVED
    for _ in range(100):
        if path.exists():
            break
        asyncio.run(asyncio.sleep(0.2))
    assert saved_model.load(str(path)).fitted
