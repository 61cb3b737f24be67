"""Record of a simulation, and figures from it."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
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
class Group:
    """Figures of one class of requests, or of all requests. Times in seconds."""

    requests: int
    ttft: dict[str, float] = field(default_factory=dict)
    """p50, p90, p99, mean."""
    slowdown: dict[str, float] = field(default_factory=dict)
    """Ratio of TTFT to the TTFT of the same request alone: p50, p90."""
    within: float | None = None
    """Goodput: share whose TTFT was within the SLO (0..1); None = no SLO given."""


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
    left: int = 0
    """Requests not answered when the simulation was ended."""

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

    @property
    def utilisation(self) -> float:
        """Busy share of the devices (0..1)."""
        return sum(self.busy_s) / len(self.busy_s) / self.seconds if self.seconds else 0.0

    def groups(
        self, threshold: int = 256, slo_s: float | Callable[[str], float] | None = None, warm: float = 0.0
    ) -> dict[str, Group]:
        """Return figures of all requests, of the short (at most ``threshold`` new tokens) and of the long requests.

        ``warm``: first share of the time, which is not counted (0..1).
        """
        new, at = self._column("new"), self._column("at")
        begin = at.min() + warm * (at.max() - at.min()) if len(at) else 0.0
        counted = at >= begin
        masks = {"all": counted, "short": counted & (new <= threshold), "long": counted & (new > threshold)}
        return {name: self._group(mask, slo_s(name) if callable(slo_s) else slo_s) for name, mask in masks.items()}

    def _group(self, mask: NDArray[np.bool_], slo_s: float | None) -> Group:
        n = int(mask.sum())
        if n == 0:
            return Group(0)
        ttft = self._column("ttft")[mask]
        lone = lone_s(self.profile, self._column("new")[mask], self._column("cached")[mask], self.chunk)
        slow = ttft / lone
        return Group(
            n,
            {**quantiles(ttft), "mean": float(ttft.mean())},
            quantiles(slow, (50, 90)),
            None if slo_s is None else float((ttft <= slo_s).mean()),
        )

    def _column(self, name: str) -> Floats:
        return np.frombuffer(getattr(self.record, name), dtype=float if name in ("at", "ttft", "wait") else np.int64)


def quantiles(values: Floats, of: Sequence[int] = QUANTILES) -> dict[str, float]:
    """Return the quantiles at these percentages, as "p50" and so on; empty without values."""
    if not len(values):
        return {}
    return {f"p{q}": float(v) for q, v in zip(of, np.percentile(values, of), strict=True)}


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
    return device + host + steps * (profile.step_host_s + profile.request_host_s) + (steps - 1) * profile.poll_s


def _lone_in_group(profile: Profile, group: GroupCost, new: Any, cached: Any) -> Any:
    lone = cache(lambda n, old: group.lone_s(n, old, RANK_CHUNK))
    host = profile.front_s + profile.reply_s
    whole = np.vectorize(lambda n, old: lone(int(n), int(old)) + profile.front_token_s * (n + old) + host, [float])
    return whole(new, cached)
