"""The question, and the setups that are compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from laps_core.config import LapsConfig

from laps_plan.profile import Profile

STOCK = ("fcfs", "hrrn", "shortest-prefill-first")
LAPS, POOLS, PAPER = "laps", "laps, pools", "laps, as published"
IN_TIME = 0.9
"""Share of the short and of the long requests that must be in time."""


@dataclass(frozen=True)
class Objectives:
    """Servers for the traffic, and objectives for the first token. Times in seconds."""

    profile: Profile
    servers: int
    short_s: float
    """Objective for the first token of a short request."""
    long_s: float
    """Objective for the first token of a long request."""


@dataclass(frozen=True)
class Question(Objectives):
    """Question about prefill servers: servers, objectives and chunk size."""

    chunk: int
    """``--chunked-prefill-size`` (tokens), divided among data-parallel attention ranks."""

    @property
    def ranks(self) -> int:
        """Return the data-parallel attention ranks of each server, which run every step together; 1 = no such ranks."""
        return 1 if self.profile.group is None else self.profile.group.ranks

    def setup(self, policy: str) -> Setup:
        """Return the setup with this policy and default knobs."""
        return Setup(policy, self.chunk, ranks=self.ranks)


@dataclass(frozen=True)
class Setup:
    """One way to serve the traffic."""

    policy: str
    """One of STOCK, or LAPS."""
    chunk: int
    knobs: Mapping[str, Any] = field(default_factory=dict)
    """Knobs of LAPS that differ from its defaults."""
    ranks: int = 1
    """Data-parallel attention ranks."""
    pools: bool = False
    """True for short and long pools behind the LAPS router; else a router picks the least load."""

    label: str = field(default="", compare=False)
    """Name in the answer, if the policy is not enough."""

    @property
    def name(self) -> str:
        return self.label or self.policy

    def with_changes(self, label: str = "", **changes: Any) -> Setup:
        """Return this setup with another ``chunk`` or ``pools``, or with these knobs of LAPS."""
        chunk, pools = changes.pop("chunk", self.chunk), changes.pop("pools", self.pools)
        return replace(self, label=label, chunk=chunk, pools=pools, knobs={**self.knobs, **changes})

    def flags(self) -> str:
        """Return the flags that start a prefill server with this setup."""
        said = [f"--chunked-prefill-size {self.chunk}"]
        if self.ranks > 1:
            said += [f"--attn-dp-size {self.ranks}", "--disable-overlap-schedule"]
        if self.policy != LAPS:
            return " ".join([f"--schedule-policy {self.policy}", *said])
        return " ".join(["--enable-laps-scheduler", *said, *LapsConfig.as_arguments(self.knobs)])


def setups_to_compare(question: Question) -> list[Setup]:
    names = [*STOCK, LAPS]
    found = [question.setup(name) for name in names]
    if question.ranks > 1:
        return found
    laps = question.setup(LAPS)
    found.append(laps.with_changes(PAPER, preset="paper"))
    return [*found, laps.with_changes(POOLS, pools=True)] if question.servers > 1 else found
