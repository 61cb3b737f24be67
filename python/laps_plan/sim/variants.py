"""Compared variants, by name, and construction of a fleet of one variant."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from laps_core.config import LapsConfig
from laps_core.group.slices import slice_s_of
from laps_core.pools.config import AllocConfig

from laps_plan.profile import Profile
from laps_plan.sim.device import Device
from laps_plan.sim.engine import Events, Server, simulate
from laps_plan.sim.fleet import LeastLoad, Plain, Pooled, RoundRobin, Single
from laps_plan.sim.group import Assign, GroupPolicy, GroupServer, Ranks
from laps_plan.sim.laps import Laps
from laps_plan.sim.memory import Memory
from laps_plan.sim.metrics import RANK_CHUNK, Outcome
from laps_plan.sim.ranks import Joint, PerRank
from laps_plan.sim.stock import POLICIES as STOCK
from laps_plan.sim.stock import Scheduler, Stock
from laps_plan.sim.tomorrow import Interleaved, Preflow, Several
from laps_plan.traffic.streams import Stream

POLICIES: dict[str, type[Stock]] = {**STOCK, "several": Several, "interleaved": Interleaved, "preflow": Preflow}
"""Policies of stock servers, and policies proposed for them."""


@dataclass(frozen=True)
class Variant:
    """Scheduling of each server. ``policy``: a stock policy; None: LAPS with the knobs in ``laps``."""

    policy: str | None = None
    laps: Mapping[str, Any] = field(default_factory=dict)

    def knobs(self, more: Mapping[str, Any]) -> LapsConfig:
        """Return the knobs of LAPS; ``more`` overrides the variant's own."""
        return LapsConfig(**{**self.laps, **more})

    def scheduler(
        self, chunk: int | None, device: Device, more: Mapping[str, Any], memory: Memory | None = None
    ) -> Scheduler:
        """Return a new scheduler; ``more``: further knobs of LAPS. ``memory``: limits LAPS only, not stock policies."""
        if self.policy is not None:
            return POLICIES[self.policy](chunk)
        return Laps(self.knobs(more), chunk, device.profile.model(), device=device, memory=memory)

    def ranks(self, profile: Profile, chunk: int | None, more: Mapping[str, Any]) -> GroupPolicy:
        """Return a new policy for a group of data-parallel attention ranks."""
        assert profile.group is not None
        if self.policy is None:
            knobs = self.knobs(more)
            return Joint(
                profile,
                RANK_CHUNK,
                guard=knobs.guard,
                slice_s=slice_s_of(knobs.slice_ms),
                overhead=knobs.preempt_overhead,
            )
        ranks = profile.group.ranks
        return PerRank(ranks, self.policy, max(1, chunk // ranks) if chunk else RANK_CHUNK)


VARIANTS: dict[str, Variant] = {
    "fcfs": Variant("fcfs"),
    "hrrn": Variant("hrrn"),
    "shortest-prefill-first": Variant("shortest-prefill-first"),
    "several": Variant("several"),
    "interleaved": Variant("interleaved"),
    "preflow": Variant("preflow"),
    "paper": Variant(laps={"preset": "paper"}),
    "dual": Variant(laps={"wait_window_ms": 0.0}),
    "laps": Variant(),
}


def run(
    variant: Variant,
    workload: Stream,
    profile: Profile,
    *,
    servers: int = 1,
    router: str = "least-load",
    chunk: int | None = 8192,
    knobs: Mapping[str, Any] | None = None,
    alloc: AllocConfig | None = None,
    seed: int = 0,
    until_s: float = float("inf"),
    overlap: bool = False,
    memory: tuple[int, float] | None = None,
) -> Outcome:
    """Simulate ``workload`` on ``servers`` servers of one variant behind ``router`` (one server needs none).

    With data-parallel attention ranks, stock policies divide ``chunk`` among the ranks, as SGLang does; LAPS uses
    RANK_CHUNK. ``overlap``: with the overlap loop. ``memory``: arguments of ``Memory``; None = unlimited.
    """
    events = Events()
    made: list[Server]
    if profile.group is not None:
        made = [
            GroupServer(
                f"http://p{i}",
                variant.ranks(profile, chunk, knobs or {}),
                Ranks(profile),
                events,
                Assign(profile.group.ranks),
                overlap=overlap,
            )
            for i in range(servers)
        ]
    else:
        meter = router == "pools" and servers > 1
        devices = [Device(profile, seed=seed * 1009 + i) for i in range(servers)]
        made = [
            Server(
                f"http://p{i}",
                variant.scheduler(chunk, device, knobs or {}, Memory(*memory) if memory else None),
                device,
                events,
                meter=meter,
                overlap=overlap,
            )
            for i, device in enumerate(devices)
        ]
    fleet: Plain
    if servers == 1:
        fleet = Single(made)
    elif router == "pools":
        fleet = Pooled(made, alloc or AllocConfig(), events)
    else:
        simple: dict[str, Callable[[list[Server]], Plain]] = {"round-robin": RoundRobin, "least-load": LeastLoad}
        fleet = simple[router](made)
    return simulate(workload, fleet, events, chunk=chunk, until_s=until_s)
