"""What the machine can do, measured on stock fcfs in the same run: lone prefills, and a closed loop of the mix."""

from __future__ import annotations

import asyncio
import random
import statistics
from dataclasses import dataclass

import numpy as np

from benchmark.load import client
from benchmark.load.connection import Target
from benchmark.load.prompts import Prompts
from benchmark.workloads.job import Job
from benchmark.workloads.named import Workload

CLIENTS = 32
LADDER = (16, 64, 128, 256, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
SAMPLE = 600


@dataclass(frozen=True)
class Lone:
    """TTFT of a request that has the server to itself, by its new tokens."""

    tokens: tuple[int, ...]
    seconds: tuple[float, ...]

    def __call__(self, new: int) -> float:
        """Seconds; between measured lengths on a line, beyond the last one in proportion."""
        if new > self.tokens[-1]:
            return self.seconds[-1] * new / self.tokens[-1]
        return float(np.interp(new, self.tokens, self.seconds))


def lone(target: Target, prompts: Prompts, longest: int, repeats: int = 5) -> Lone:
    """Measure it: medians. Raises ConnectionError."""
    tokens = tuple(sorted({n for n in LADDER if n < longest} | {longest}))
    seconds: list[float] = []
    for n in reversed(tokens):
        # The first of them is not counted; long ones are sent less often, they vary less.
        few = repeats if n > 1024 else 3 * repeats
        bodies = prompts.bodies([Job(0.0, n)] * (few + 1), seed=n)
        took = statistics.median(asyncio.run(client.one_by_one(target, bodies))[1:])
        # A disturbed one never makes a shorter prompt look slower than a longer one.
        seconds.append(min([took, *seconds]))
    return Lone(tokens, tuple(reversed(seconds)))


def capacity(target: Target, workload: Workload, prompts: Prompts, seconds: float, seed: int) -> float:
    """Requests/s of the workload's sample in a closed loop of CLIENTS. Raises ConnectionError."""
    jobs = workload.sample(SAMPLE, random.Random(f"{seed} sample"))
    loop = asyncio.run(client.closed(target, prompts.bodies(jobs, seed), CLIENTS, seconds, run_in_s=1.0))
    if loop.failed or not loop.ttft_s:
        raise ConnectionError(f"{loop.failed} requests to {target.url} failed in a closed loop")
    return loop.rate
