"""The right answers: what the same servers say to each prompt while nothing is wrong."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from benchmark.faults.clients import Bare, bounded
from benchmark.faults.oracle import Seen
from benchmark.faults.prompts import Prompt

TOGETHER = 12


class Unsteady(RuntimeError):
    """A fault-free server gave no answer, or not the same one twice. The message is one line."""


async def answers(port: int, prompts: Sequence[Prompt]) -> list[Any]:
    """Each prompt's answer, asked for whole, and once more as a stream in other company. Raises Unsteady."""
    first = await _all(port, prompts, stream=False, together=2)
    second = await _all(port, list(reversed(prompts)), stream=True, together=TOGETHER)
    for i, (a, b) in enumerate(zip(first, reversed(second), strict=True)):
        for seen in (a, b):
            if not seen.done or not seen.got:
                raise Unsteady(
                    f"prompt {i} ({prompts[i].route}) without faults: {seen.status} {seen.reason} {seen.broken}"
                )
        if a.got != b.got:
            raise Unsteady(f"prompt {i} ({prompts[i].route}) has two answers without faults: {a.got!r}, {b.got!r}")
    return [a.got for a in first]


async def _all(port: int, prompts: Sequence[Prompt], stream: bool, together: int) -> list[Seen]:
    bare, room = Bare(port), asyncio.Semaphore(together)

    async def one(prompt: Prompt) -> Seen:
        seen = Seen(0, "baseline", stream=stream)
        async with room:
            return await bounded(bare(prompt, seen, {}), seen, time.monotonic)

    return list(await asyncio.gather(*map(one, prompts)))
