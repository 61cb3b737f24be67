"""Servers whose long batches pause after each layer, and requests to them."""

from __future__ import annotations

import asyncio
import json
import random
import time
from typing import Any

import served
from served import LAPS, Prefill, Setup

from benchmark.rig import devices, model

LAYERS = 12
SHAPE = model.Shape(hidden=64, layers=LAYERS, heads=2, kv_heads=1, intermediate=512)
"""Model with enough layers to pause between."""
PAUSE_AFTER_EACH_LAYER = ("--laps-config", json.dumps({"slice_ms": 0.01, "preempt_overhead": 1.0}))
"""Arguments for a pause after each layer and a tiny gap, for as many preemptions as possible."""
WITH_PREFIX_CACHE = devices.with_path(devices.with_path({}, served.HICACHE), devices.PREFIXES)
"""Environment in which prefixes are cached although there is no decode server."""


def slicing_setup(name: str, *args: str) -> Setup:
    """Return the setup of a server that pauses after each layer, with these arguments."""
    return Setup(name, (*LAPS, *PAUSE_AFTER_EACH_LAYER, *args), WITH_PREFIX_CACHE, SHAPE)


def request_body(prompt: list[int], rid: str | None = None, **sampling: Any) -> dict[str, Any]:
    """Return a body for ``/generate`` with a random bootstrap room."""
    return served.request_body(random.getrandbits(60), prompt, rid, **sampling)


async def post(http: Any, prefill: Prefill, body: dict[str, Any], delay_s: float = 0.0) -> tuple[int, Any, float]:
    """Send a request and return (status, answer, Unix time when the server finished it). The server's time is
    used because a delayed client reads answers late."""
    await asyncio.sleep(delay_s)
    async with http.post(prefill.server.url + "/generate", json=body) as reply:
        answer = await reply.json()
        # The answer to a request that was aborted while waiting has no times.
        return reply.status, answer, answer.get("meta_info", {}).get("request_finished_ts", time.time())


def arrived_during(answer: dict[str, Any], long: dict[str, Any]) -> bool:
    """Return True if a request arrived at the server while a long request was running."""
    arrived_s, other = answer["meta_info"]["request_received_ts"], long["meta_info"]
    return bool(other["forward_entry_time"] <= arrived_s < other["request_finished_ts"])


def count_preemptions(prefill: Prefill) -> int:
    """Return the number of preemptions by short batches."""
    return int(prefill.get("/laps_status")["preemption"]["by_short_batches"])


async def wait_until_slices_run(http: Any, prefill: Prefill, long: Any) -> None:
    """Wait until no request is queued, so that the first long batch runs."""
    while not long.done():
        async with http.get(prefill.server.url + "/v1/loads?include=core") as reply:
            await reply.read()
        async with http.get(prefill.server.url + "/laps_status") as reply:
            status = await reply.json()
        if not any(q["depth"] for q in status["queues"].values()):
            return
