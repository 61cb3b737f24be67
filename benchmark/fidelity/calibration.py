"""Host time of a server, found in lone requests and in a load: the profile that the simulator needs of it."""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from laps_plan.profile import Profile
from laps_plan.sim.metrics import lone_s
from laps_plan.traffic.job import Job
from scipy.optimize import nnls

from benchmark.fidelity.compare import Simulator, quantiles
from benchmark.load import client
from benchmark.rig.fleet import Fleet

REPEATS = 14
PAUSE_S = 0.03
"""Mean pause between lone requests (seconds)."""


@dataclass
class Alone:
    """Requests that had their server to themselves. Times in seconds."""

    tokens: list[int]
    ttft: list[float]
    device: list[float]
    """Device time; empty if unknown."""


@dataclass(frozen=True)
class Setup:
    """A server whose host is to be calibrated."""

    device: Profile
    """The device alone, without any time of a host."""
    chunk: int
    """Tokens."""

    @classmethod
    def of(cls, known: Profile, chunk: int) -> Setup:
        """Return the setup of this machine with the device of a profile."""
        bare = Profile(
            name=known.name, source=f"{known.source}; host: this machine", coefficients=known.coefficients, poll_s=0.0,
            layers=known.layers, ahead=known.ahead, launch_s=known.launch_s, slices_launch_s=known.slices_launch_s,
        )  # fmt: skip
        return cls(bare, chunk)

    def alone_s(self, tokens: Sequence[int]) -> list[float]:
        """Return the device time of prompts alone (seconds)."""
        bare = Profile(name="", source="", coefficients=self.device.coefficients, poll_s=0.0)
        return [float(s) for s in lone_s(bare, list(tokens), [0] * len(tokens), self.chunk)]

    def profile(self, seen: Alone, slowed: float) -> Profile:
        """Return the profile: the step model, host times and the spread of steps from requests alone.

        What the TTFT of a lone request leaves beside its device time is a constant, a share per token and a share per
        step; with the overlap loop that of a step is hidden, so they are to be of a server without it. Under load these
        take ``slowed`` times as long: client, HTTP and scheduler share few cores.
        """
        tokens, left = np.array(seen.tokens), np.array(seen.ttft) - np.array(seen.device)
        lengths = sorted(set(seen.tokens))
        middle = np.array([np.median(left[tokens == n]) for n in lengths])
        columns = np.column_stack(
            (np.ones(len(lengths)), np.array(lengths, dtype=float), np.ceil(np.array(lengths) / self.chunk))
        )
        fixed, per_token, per_step = nnls(columns / middle[:, None], np.ones(len(lengths)))[0].tolist()
        # One step each: how its time varies around what the model says.
        rows = zip(seen.tokens, seen.device, self.alone_s(seen.tokens), strict=True)
        factors = sorted(took / model_s for n, took, model_s in rows if n <= self.chunk)
        usual = statistics.median(factors)
        return replace(
            self.device,
            front_s=slowed * fixed / 2,
            front_token_s=slowed * per_token,
            poll_s=slowed * per_step / 2,
            step_host_s=slowed * per_step / 2,
            reply_s=slowed * fixed / 2,
            spread=[round(f / usual, 4) for f in factors],
            details={
                "chunk": self.chunk,
                "slowed_under_load": slowed,
                "lone_ttft_ms": {str(n): 1e3 * float(np.median(np.array(seen.ttft)[tokens == n])) for n in lengths},
                "beside_the_device_ms": {str(n): 1e3 * float(m) for n, m in zip(lengths, middle, strict=True)},
            },
        )

    def under_load(
        self, seen: Alone, policy: str, jobs: Sequence[Job], ttft: Sequence[float], *, overlap: bool = False
    ) -> Profile:
        """Return the profile of a host that is as much slower under load than alone as makes the simulator give the
        median TTFT (seconds) that short requests of the load ``jobs`` had."""
        wanted = quantiles([job.new for job in jobs], ttft)["short P50"]

        def over(slowed: float) -> bool:
            record = Simulator(self.profile(seen, slowed), self.chunk, overlap=overlap).run(policy, jobs).record
            return quantiles(record.new, record.ttft)["short P50"] > wanted

        grid = [x / 100 for x in range(100, 301)]
        return self.profile(seen, grid[min(bisect_left(grid, True, key=over), len(grid) - 1)])


def alone(
    fleet: Fleet, name: str, lengths: Sequence[int], seed: int, busy_s: Callable[[], float] | None = None
) -> Alone:
    """Send every length, in random order, with pauses as they occur under load: a server that has just answered is
    quicker. ``busy_s``: tells the device time that the server has used so far; asked after each."""
    rng = random.Random(f"{seed} alone")
    # Long ones are sent less often, they vary less.
    tokens = [n for n in lengths for _ in range(REPEATS if n <= 4096 else REPEATS // 3)]
    rng.shuffle(tokens)
    busy = []

    def bodies() -> Iterator[bytes]:
        for body in fleet.prompts.bodies([Job(0.0, n) for n in tokens], seed):
            if busy_s:
                busy.append(busy_s())
            time.sleep(rng.expovariate(1.0 / PAUSE_S))
            yield body
        if busy_s:
            busy.append(busy_s())

    ttft = asyncio.run(client.one_by_one(fleet.target(name), bodies()))
    return Alone(tokens, ttft, [b - a for a, b in itertools.pairwise(busy)])
