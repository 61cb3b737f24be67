"""Record of a simulation, and figures from it."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
from laps_core.group.cost import GroupCost
from numpy.typing import NDArray

from laps_plan.profile import Profile
from laps_plan.sim.request import Request
from laps_plan.traffic.little import STEADY, Asked, Steady, steady
from laps_plan.traffic.streams import TURNAROUND_S

Floats = NDArray[np.float64]
QUANTILES = (50, 90, 99)
RANK_CHUNK = 8192
"""Maximum new tokens in a batch of a data-parallel attention rank, limited by its memory."""


class Record:
    """Answered requests, as columns."""

    def __init__(self) -> None:
        self.at, self.ttft, self.wait = array("d"), array("d"), array("d")
        self.new, self.cached, self.client = array("l"), array("l"), array("l")
        self._add = (
            *(self.at.append, self.ttft.append, self.wait.append),
            *(self.new.append, self.cached.append, self.client.append),
        )

    def __len__(self) -> int:
        return len(self.at)

    def add(self, request: Request, answered: float) -> None:
        """Record that ``request`` has its first token at ``answered`` (seconds)."""
        at, ttft, wait, new, cached, client = self._add
        at(request.at)
        ttft(answered - request.at)
        wait(request.started - request.ready)
        new(request.prompt - request.cached)
        cached(request.cached)
        client(-1 if request.job is None else request.job.client)


@dataclass
class Outcome:
    """Outcome of one simulation."""

    record: Record
    profile: Profile
    chunk: int | None
    seconds: float
    """Simulated time from the first arrival to the last answer."""
    busy_s: list[float]
    """Device time used by each server."""
    batches: int
    sent: int
    """Requests that arrived."""
    moves: list[tuple[float, str, str]] = field(default_factory=list)
    """(time, instance, new pool of the instance)."""

    @property
    def rate(self) -> float:
        """Requests answered per second."""
        return len(self.record) / self.seconds if self.seconds else 0.0

    def steady_span(self) -> tuple[float, float]:
        """Return start and end of the time in which requests of a closed loop are counted, by ``STEADY`` (seconds)."""
        begin, end = (float(np.quantile(self.record.at, share)) for share in STEADY)
        return begin, end

    def steady(self, clients: int, pause_s: float = sum(TURNAROUND_S) / 2) -> Steady:
        """Return figures of a closed loop of ``clients``. ``pause_s``: mean time from an answer to the next request."""
        r = self.record
        asked = [
            Asked(client, at, ttft + pause_s, ttft, new)
            for client, at, ttft, new in zip(r.client, r.at, r.ttft, r.new, strict=True)
        ]
        return steady(asked, clients, *self.steady_span())


def quantiles(values: Floats) -> dict[str, float]:
    """Return p50, p90 and p99; empty without values."""
    if not len(values):
        return {}
    return {f"p{q}": float(v) for q, v in zip(QUANTILES, np.percentile(values, QUANTILES), strict=True)}


def lone_s(profile: Profile, new: Any, cached: Any, chunk: int | None) -> Any:
    """Return the TTFT of a request alone on an idle server (seconds); ``new``, ``cached``: numbers or arrays."""
    if (group := profile.group_with_host) is not None:
        return _lone_in_group(profile, group, new, cached)
    new = np.asarray(new, dtype=float)
    cached = np.asarray(cached, dtype=float)
    steps = np.ceil(new / chunk) if chunk else np.ones_like(new)
    c = profile.coefficients
    # The sum of attention does not depend on the chunks. Each later chunk reads the earlier chunks as history.
    read = steps * cached + (chunk or 0) * steps * (steps - 1) / 2
    device = c.alpha * new * (new + 2 * cached) + c.linear * new + c.gamma_r * read + steps * (c.per_request + c.fixed)
    device += c.linear * np.maximum(0, c.flat - (new - (steps - 1) * (chunk or 0)))  # padding of the last step
    host = profile.front_s + profile.front_token_s * (new + cached) + profile.reply_s
    return device + host + steps * profile.step_host_s + (steps - 1) * profile.poll_s


def _lone_in_group(profile: Profile, group: GroupCost, new: Any, cached: Any) -> Any:
    lone = cache(lambda n, old: group.lone_s(n, old, RANK_CHUNK))
    host = profile.front_s + profile.reply_s
    whole = np.vectorize(lambda n, old: lone(int(n), int(old)) + profile.front_token_s * (n + old) + host, [float])
    return whole(new, cached)
