"""Host time of this machine, beside the device time: measured with lone requests, and under a load.

The simulator reads the host time from a profile. Lone requests run without the overlap loop, which hides a part of the
host time. Under load the host time is longer, because client, HTTP and scheduler share few cores.
"""

from __future__ import annotations

import asyncio
import random
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from laps_plan.profile import Profile
from laps_plan.sim.metrics import lone_s
from laps_plan.traffic.job import Job
from scipy.optimize import nnls

from benchmark.fidelity.compare import Simulator, quantiles
from benchmark.load import client
from benchmark.rig import Fleet

LADDER = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Lengths of lone requests (tokens)."""
REPEATS = 14
PAUSE_S = 0.03
"""Mean pause between lone requests (seconds)."""


@dataclass
class LoneRequests:
    """Lengths and TTFTs of lone requests."""

    tokens: list[int]
    ttft: list[float]
    """Seconds."""

    @classmethod
    def measure(cls, fleet: Fleet, name: str, seed: int) -> LoneRequests:
        """Send every length of LADDER, in random order. The pauses are like those under load, because a server that has
        just answered is quicker."""
        rng = random.Random(f"{seed} alone")
        # Long requests are sent less often, because their times vary less.
        tokens = [n for n in LADDER for _ in range(REPEATS if n <= 4096 else REPEATS // 3)]
        rng.shuffle(tokens)

        def bodies() -> Iterator[bytes]:
            for body in fleet.prompts.bodies([Job(0.0, n) for n in tokens], seed):
                time.sleep(rng.expovariate(1.0 / PAUSE_S))
                yield body

        return cls(tokens, asyncio.run(client.one_by_one(fleet.target(name), bodies())))


@dataclass(frozen=True)
class Host:
    """Host times of this machine, beside a device whose profile is known."""

    device: Profile
    chunk: int
    """Tokens."""
    alone: LoneRequests

    def profile(self, slowed: float) -> Profile:
        """Return the device's profile with this host, ``slowed`` times as slow as with lone requests.

        The host time is the TTFT of a lone request less its device time. It is fitted by a constant, a time per token
        and a time per step.
        """
        known, tokens = self.device, np.array(self.alone.tokens)
        lengths = sorted(set(self.alone.tokens))
        bare = Profile(name="", source="", coefficients=known.coefficients, poll_s=0.0)
        seen_s = np.array([np.median(np.array(self.alone.ttft)[tokens == n]) for n in lengths])
        beside_s = seen_s - np.asarray(lone_s(bare, lengths, [0] * len(lengths), self.chunk))
        columns = np.column_stack((np.ones(len(lengths)), np.array(lengths), np.ceil(np.array(lengths) / self.chunk)))
        found = nnls(columns / beside_s[:, None], np.ones(len(lengths)))[0]
        fixed, per_token, per_step = (slowed * found).tolist()
        return replace(
            known, source=f"{known.source}; host: this machine", front_s=fixed / 2, reply_s=fixed / 2,
            front_token_s=per_token, poll_s=per_step / 2, step_host_s=per_step / 2,
            details={
                "chunk": self.chunk,
                "slowed_under_load": slowed,
                "lone_ttft_ms": {str(n): 1e3 * float(s) for n, s in zip(lengths, seen_s, strict=True)},
                "beside_the_device_ms": {str(n): 1e3 * float(s) for n, s in zip(lengths, beside_s, strict=True)},
            },
        )  # fmt: skip

    def profile_under_load(self, policy: str, jobs: Sequence[Job], ttft: Sequence[float]) -> Profile:
        """Return the profile with the least slowdown of the host (1 to 3) whose simulated median TTFT of short requests
        exceeds the measured one. ``jobs``, ``ttft``: the load and its measured TTFTs (seconds)."""
        wanted = quantiles([job.new for job in jobs], ttft)["short P50"]

        def over(slowed: float) -> bool:
            record = Simulator(self.profile(slowed), self.chunk).run(policy, jobs).record
            return quantiles(record.new, record.ttft)["short P50"] > wanted

        grid = [x / 100 for x in range(100, 301)]
        return self.profile(grid[min(bisect_left(grid, True, key=over), len(grid) - 1)])
