"""Mixed load for as long as it is wanted: so many clients, each busy with one deed after the other."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from benchmark.faults.deeds import Crowd
from benchmark.faults.oracle import Oracle
from benchmark.faults.schedule import Deed

CLIENTS = 24
THINK_S = 1.0
"""Longest pause of a client between two deeds: servers that start again need some of the cores too."""


@dataclass
class Span:
    """What was to be done, and how long it took."""

    requests: int
    """Go on until so many have ended,"""
    seconds: float
    """but not longer than this."""
    covered: Callable[[], bool]
    """Go on beyond ``requests`` until every fault has happened."""
    took_s: float = 0.0
    over: bool = field(default=False, init=False)
    """Set it to end early."""


async def run(crowd: Crowd, work: Iterator[Deed], oracle: Oracle, span: Span) -> None:
    """Until the span is over and every request has ended."""
    begin = time.monotonic()

    async def client() -> None:
        while not span.over:
            deed = next(work)
            await crowd.do(deed)
            await asyncio.sleep(random.Random(deed.seed).random() * THINK_S)
            late = time.monotonic() - begin > span.seconds
            span.over = span.over or late or (len(oracle.ends) >= span.requests and span.covered())

    clients = [asyncio.ensure_future(client()) for _ in range(CLIENTS)]
    try:
        await asyncio.gather(*clients)
    finally:
        for c in clients:
            c.cancel()
        span.took_s = time.monotonic() - begin
