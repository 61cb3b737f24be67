"""Settings of servers for whole answers, and the simulation of a setting."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from laps_core.config import LapsConfig, format_value
from numpy.typing import NDArray

from laps_plan.profile import Profile
from laps_plan.sim.colocated import LapsColocated, StockColocated
from laps_plan.sim.decoding import DecodeOnly, DecodingServer, Disaggregated, PrefillServer
from laps_plan.sim.device import Device
from laps_plan.sim.engine import Events, simulate
from laps_plan.sim.fleet import LeastLoad, Plain, Single
from laps_plan.sim.metrics import Floats, Outcome
from laps_plan.sim.stock import Scheduler
from laps_plan.sim.streams import Tokens
from laps_plan.sim.variants import LAPS, scheduler
from laps_plan.traffic.job import THRESHOLD
from laps_plan.traffic.streams import Stream

LATE_TOKENS = 0.01
"""Share of an answer's tokens that may come late."""


@dataclass(frozen=True)
class Serving:
    """One setting of servers."""

    policy: str
    """Policy of SGLang's, or LAPS."""
    chunk: int = 8192
    interval: int = 0
    """``--prefill-decode-interval``"""
    mixed: bool = False
    """``--enable-mixed-chunk``"""
    prefill: int = 0
    """Number of servers that only prefill, while the others only decode; 0 = each server does both."""
    knobs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        said = [self.policy] if self.policy == LAPS and self.chunk == 8192 else [f"{self.policy}, {self.chunk}"]
        said += [f"interval {self.interval}"] if self.interval else []
        said += ["mixed"] if self.mixed else []
        said += [f"{key} {format_value(value)}" for key, value in self.knobs.items()]
        return ", ".join(said)

    def flags(self) -> str:
        """Return the flags that start a server with this setting."""
        said = ["--enable-laps-scheduler"] if self.policy == LAPS else [f"--schedule-policy {self.policy}"]
        said += [f"--chunked-prefill-size {self.chunk}"]
        said += [f"--prefill-decode-interval {self.interval}"] if self.interval else []
        said += ["--enable-mixed-chunk"] if self.mixed else []
        return " ".join([*said, *LapsConfig.as_arguments(self.knobs)])

    def scheduler(self, device: Device) -> Scheduler:
        if self.prefill:
            return scheduler(self.policy, self.chunk, device, self.knobs)
        if self.policy == LAPS:
            return LapsColocated(LapsConfig(**self.knobs), self.chunk, device.profile.model(), device)
        return StockColocated(self.policy, self.chunk, device, interval=self.interval, mixed=self.mixed)


@dataclass
class Answers:
    """All answers of one simulation, in order of arrival. Times in seconds."""

    outcome: Outcome
    logs: Tokens
    at: Floats
    ttft: Floats
    new: Floats
    output: Floats
    number: Floats

    @property
    def rate(self) -> float:
        return len(self.at) / self.outcome.seconds

    @property
    def short(self) -> NDArray[np.bool_]:
        """Return a mask of the answers to short prompts."""
        return self.new <= THRESHOLD

    def in_time(self, short_s: float, long_s: float, tbt_s: float) -> NDArray[np.bool_]:
        """Return a mask of the answers in time: the first token within the objective of its class, and all other tokens
        but LATE_TOKENS of them within `tbt_s` after the token before."""
        late = self.logs.late(tbt_s)
        tokens_late = np.array([late[int(n)] for n in self.number])
        first = self.ttft <= np.where(self.short, short_s, long_s)
        return first & (tokens_late <= LATE_TOKENS * (self.output - 1))


def serve(serving: Serving, workload: Stream, profile: Profile, servers: int = 1, *, warm_s: float = 0.0) -> Answers:
    """Simulate one setting. ``servers``: number of devices. ``warm_s``: earlier requests are served and not counted.

    Raises ValueError (one line) if the profile has no cost of decode steps.
    """
    profile.decode_s(1, 1)
    events = Events()
    devices = [Device(profile, seed=i) for i in range(servers)]
    fleet: Plain
    if serving.prefill:
        split = serving.prefill
        first = [
            PrefillServer(f"p{i}", serving.scheduler(d), d, events, overlap=True) for i, d in enumerate(devices[:split])
        ]
        decode = [DecodingServer(f"d{i}", DecodeOnly(d), d, events) for i, d in enumerate(devices[split:])]
        fleet = Disaggregated(first, decode, events)
    else:
        decode = [DecodingServer(f"s{i}", serving.scheduler(d), d, events) for i, d in enumerate(devices)]
        fleet = Single(decode) if servers == 1 else LeastLoad(decode)
    outcome = simulate(workload, fleet, events, chunk=serving.chunk)
    logs = [server.log for server in decode]
    done = sorted((r for log in logs for r in log.requests if r.at >= warm_s), key=lambda r: (r.at, r.number))
    columns = np.array(
        [(r.at, r.first_s - r.at, r.prompt - r.cached, r.output, r.number) for r in done], dtype=float
    ).reshape(-1, 5)
    return Answers(outcome, Tokens.of(logs, warm_s), *columns.T)
