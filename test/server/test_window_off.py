"""Window 0 is the dual queue and nothing else; the adaptive window leaves a lone user alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sglang_laps import saved_model

from .conftest import LAPS, Prefill
from .test_prefill_server import ids, send_all

pytestmark = [pytest.mark.usefixtures("clean")]
SLOW = ("--laps-wait-window-ms", "2000", "--laps-config")


@pytest.fixture(scope="module", params=["off", "awd"])
def prefill(
    request: pytest.FixtureRequest, start_prefill: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prefill]:
    saved = tmp_path_factory.mktemp("profile") / "model.json"
    knobs = f'{{"profile": "{saved}"}}'
    args = ("--laps-wait-window-ms", "0") if request.param == "off" else (*SLOW, knobs)
    with start_prefill(*LAPS, *args) as running:
        running.saved = saved
        yield running


def test_requests_one_at_a_time_never_wait(prefill: Prefill) -> None:
    for i in range(40):
        asyncio.run(send_all(prefill, [ids(i, 16 + 4 * i)]))
    window = prefill.get("/laps_status")["window"]
    # With a window of two seconds any wait would stand in the last bucket.
    assert window["dispatched"]["window"] == 0
    assert window["waits_ms"][">50"] == 0


def test_a_crowd_is_served(prefill: Prefill) -> None:
    for round_ in range(3):
        assert len(asyncio.run(send_all(prefill, [ids(100 * round_ + i, 30) for i in range(24)]))) == 24


def test_the_latency_model_is_saved_when_idle(prefill: Prefill) -> None:
    if prefill.get("/laps_status")["window"]["mode"] == "off":
        pytest.skip("no path was given")
    prefill.all_tokens_are_free()
    path: Path = prefill.saved  # type: ignore[attr-defined]
    for _ in range(100):
        if path.exists():
            break
        asyncio.run(asyncio.sleep(0.2))
    assert saved_model.load(str(path)).fitted
