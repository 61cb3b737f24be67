"""Servers whose long batches pause after each layer, and what is asked of them."""

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
"""Layers enough to be cut between."""
EVERY_LAYER = ("--laps-config", json.dumps({"slice_ms": 0.01, "preempt_overhead": 1.0}))
"""A pause after each layer, and hardly a gap: as many preemptions as can be had."""
CACHED = devices.with_path(devices.with_path({}, served.HICACHE), devices.PREFIXES)
"""Prefixes are cached though no decode server is there."""


def setup(name: str, *args: str) -> Setup:
    """A server with these arguments."""
    return Setup(name, (*LAPS, *EVERY_LAYER, *args), CACHED, SHAPE)


def ask(prompt: list[int], rid: str | None = None, **sampling: Any) -> dict[str, Any]:
    """A body for ``/generate``."""
    return served.ask(random.getrandbits(60), prompt, rid, **sampling)


async def post(http: Any, prefill: Prefill, body: dict[str, Any], delay_s: float = 0.0) -> tuple[int, Any, float]:
    """(status, answer, when the server had it: ``time.time()``). A client that is held up would read answers late, and
    several at once."""
    await asyncio.sleep(delay_s)
    async with http.post(prefill.server.url + "/generate", json=body) as reply:
        answer = await reply.json()
        # One that is aborted while it waits is answered without times.
        return reply.status, answer, answer.get("meta_info", {}).get("request_finished_ts", time.time())


def came_amid(answer: dict[str, Any], long: dict[str, Any]) -> bool:
    """Return True if a request came to the server when a long one had been put into a batch, and was not done."""
    came, other = answer["meta_info"]["request_received_ts"], long["meta_info"]
    return bool(other["forward_entry_time"] <= came < other["request_finished_ts"])


def preemptions(prefill: Prefill) -> int:
    """Return how often a short batch has preempted."""
    return int(prefill.get("/laps_status")["preemption"]["by_short_batches"])


async def until_slices_run(http: Any, prefill: Prefill, long: Any) -> None:
    """Come back once the long request's first batch is on the device: if the machine is held up, before or after."""
    while not long.done():
        async with http.get(prefill.server.url + "/v1/loads?include=core") as reply:
            await reply.read()
        async with http.get(prefill.server.url + "/laps_status") as reply:
            status = await reply.json()
        if not any(q["depth"] for q in status["queues"].values()):
            return
