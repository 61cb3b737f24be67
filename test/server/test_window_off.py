"""Window 0 gives the dual queue only; the adaptive window never holds the requests of a lone user."""

from __future__ import annotations

import asyncio

import pytest
from served import NO_PREFIX_CACHE, SAVED_MODEL, SLOW_WINDOW, Prefill, random_prompt, run_on, send_all
from sglang_laps import saved_model

pytestmark = run_on(NO_PREFIX_CACHE, SLOW_WINDOW)


def test_sequential_requests_never_wait(prefill: Prefill) -> None:
    before = prefill.get("/laps_status")["window"]
    for i in range(40):
        asyncio.run(send_all(prefill, [random_prompt(i, 16 + 4 * i)]))
    after = prefill.get("/laps_status")["window"]
    # With a window of two seconds any hold would be counted in the last bucket.
    assert after["dispatched"]["window"] == before["dispatched"]["window"]
    assert after["waits_ms"][">50"] == before["waits_ms"][">50"]


def test_concurrent_requests_are_all_answered(prefill: Prefill) -> None:
    for round_ in range(3):
        assert len(asyncio.run(send_all(prefill, [random_prompt(100 * round_ + i, 30) for i in range(24)]))) == 24


def test_latency_model_is_saved_when_idle(prefill: Prefill) -> None:
    if prefill.setup is not SLOW_WINDOW:
        pytest.skip("no path was given")
    prefill.require_all_tokens_free()
    path = prefill.folder / SAVED_MODEL
    for _ in range(100):
        if path.exists():
            break
        asyncio.run(asyncio.sleep(0.2))
    assert saved_model.load(str(path)).fitted
