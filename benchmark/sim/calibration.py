"""Host times of a server, fitted to lone requests and to a load: the profile for the simulator."""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from laps_core.latency.step import Coefficients
from laps_plan.profile import Profile
from laps_plan.sim.metrics import Outcome, lone_s
from laps_plan.sim.variants import VARIANTS, run
from laps_plan.traffic.job import THRESHOLD, Job
from laps_plan.traffic.streams import Trace
from scipy.optimize import nnls

from benchmark.load import client
from benchmark.rig.fleet import Fleet

REPEATS = 14
PAUSE_S = 0.03
"""Mean pause between lone requests (seconds)."""
PATIENCE_S = 60.0


@dataclass
class Alone:
    """Requests that had their server to themselves. Times in seconds."""

    tokens: list[int]
    ttft: list[float]
    device: list[float]
    """Device time; empty = not told."""


@dataclass(frozen=True)
class Setup:
    """A server to calibrate."""

    name: str
    """Name of the profile."""
    source: str
    known: Coefficients
    """Latency model of its steps."""
    chunk: int
    """Tokens."""
    layers: int
    ahead: bool = False
    launch_s: float = 0.0
    slices_launch_s: float = 0.0
    """Host times of launches, as in a profile (seconds)."""

    def profile(self, seen: Alone, slowed: float) -> Profile:
        """The profile: the step model, host times and the spread of steps from requests alone.

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
        bare = Profile(name="", source="", coefficients=self.known, poll_s=0.0)
        # One step each: how its time varies around what the model says.
        factors = sorted(
            took / float(lone_s(bare, n, 0, self.chunk))
            for n, took in zip(seen.tokens, seen.device, strict=True)
            if n <= self.chunk
        )
        usual = statistics.median(factors)
        return Profile(
            name=self.name,
            source=self.source,
            coefficients=self.known,
            front_s=slowed * fixed / 2,
            front_token_s=slowed * per_token,
            poll_s=slowed * per_step / 2,
            step_host_s=slowed * per_step / 2,
            reply_s=slowed * fixed / 2,
            launch_s=self.launch_s,
            slices_launch_s=self.slices_launch_s,
            layers=self.layers,
            ahead=self.ahead,
            spread=[round(f / usual, 4) for f in factors],
            details={
                "chunk": self.chunk,
                "slowed_under_load": slowed,
                "lone_ttft_ms": {str(n): 1e3 * float(np.median(np.array(seen.ttft)[tokens == n])) for n in lengths},
                "beside_the_device_ms": {str(n): 1e3 * float(m) for n, m in zip(lengths, middle, strict=True)},
            },
        )

    def under_load(self, seen: Alone, variant: str, rows: Sequence[Job], ttft: Sequence[float], **how: Any) -> Profile:
        """The profile of a host that is as much slower under load than alone as makes the simulator give the median
        TTFT (seconds) that short requests of the load ``rows`` had. ``how``: as of ``simulated``."""
        wanted = quantiles([r.new for r in rows], ttft)["short P50"]

        def over(slowed: float) -> bool:
            record = simulated(self.profile(seen, slowed), variant, rows, self.chunk, **how).record
            return quantiles(record.new, record.ttft)["short P50"] > wanted

        grid = [x / 100 for x in range(100, 301)]
        return self.profile(seen, grid[min(bisect_left(grid, True, key=over), len(grid) - 1)])


def measure(fleet: Fleet, name: str, jobs: Sequence[Job], seed: int) -> list[float]:
    """TTFT of each on a real server (seconds). Raises ConnectionError if one fails."""
    bodies = fleet.prompts.bodies(jobs, seed)
    seen = [a.ttft_s for a in asyncio.run(client.replay(fleet.target(name), jobs, bodies, PATIENCE_S))]
    if None in seen:
        raise ConnectionError(f"{seen.count(None)} requests to {name} failed")
    return [t for t in seen if t is not None]


def alone(
    fleet: Fleet, name: str, lengths: Sequence[int], seed: int, busy_s: Callable[[], float] | None = None
) -> Alone:
    """Every length, in random order, with pauses as they occur under load: a server that has just answered is quicker.

    ``busy_s``: tells the device time that the server has used so far; asked after each.
    """
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


def simulated(
    profile: Profile,
    name: str,
    rows: Sequence[Job],
    chunk: int,
    seed: int = 0,
    knobs: Mapping[str, Any] | None = None,
    *,
    overlap: bool = False,
) -> Outcome:
    """The same arrivals in the simulator; ``overlap``: with the overlap loop."""
    return run(VARIANTS[name], Trace(rows), profile, chunk=chunk, seed=seed, knobs=knobs, overlap=overlap)


def quantiles(tokens: Sequence[int], ttft: Sequence[float]) -> dict[str, float]:
    """Name -> seconds: P50 and P90 of both classes."""
    found = {}
    for kind, wanted in (("short", True), ("long", False)):
        times = [t for n, t in zip(tokens, ttft, strict=True) if (n <= THRESHOLD) is wanted]
        for q in (50, 90):
            found[f"{kind} P{q}"] = float(np.percentile(times, q))
    return found
