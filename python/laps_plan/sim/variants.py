"""Policies by name, and the simulation of servers with one of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from laps_core.config import LapsConfig
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
LAPS = "laps"


def scheduler(
    policy: str, chunk: int | None, device: Device, knobs: Mapping[str, Any], memory: Memory | None = None
) -> Scheduler:
    """Return a new scheduler: one of POLICIES, or LAPS with these knobs. ``memory``: limits LAPS only."""
    if policy == LAPS:
        return Laps(LapsConfig(**knobs), chunk, device.profile.model(), device=device, memory=memory)
    return POLICIES[policy](chunk)


def group_policy(policy: str, profile: Profile, chunk: int | None, knobs: Mapping[str, Any]) -> GroupPolicy:
    """Return a new policy for a group of data-parallel attention ranks."""
    assert profile.group is not None
    if policy == LAPS:
        return Joint(profile, LapsConfig(**knobs))
    ranks = profile.group.ranks
    return PerRank(ranks, policy, max(1, chunk // ranks) if chunk else RANK_CHUNK)


def run(
    policy: str,
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
    """Simulate ``workload`` on ``servers`` servers behind ``router`` (one server needs none).

    ``policy`` is one of POLICIES, or LAPS with ``knobs``. With data-parallel attention ranks, stock policies divide
    ``chunk`` among the ranks, as SGLang does; LAPS uses RANK_CHUNK. ``overlap``: with SGLang's overlap loop.
    ``memory``: arguments of ``Memory``; None = unlimited.
    """
    events, knobs = Events(), knobs or {}
    made: list[Server] = []
    for i in range(servers):
        name = f"http://p{i}"
        if profile.group is not None:
            joint = group_policy(policy, profile, chunk, knobs)
            made.append(GroupServer(name, joint, Ranks(profile), events, Assign(profile.group.ranks), overlap=overlap))
        else:
            device = Device(profile, seed=seed * 1009 + i)
            own = scheduler(policy, chunk, device, knobs, Memory(*memory) if memory else None)
            meter = router == "pools" and servers > 1
            made.append(Server(name, own, device, events, meter=meter, overlap=overlap))
    fleet: Plain
    if servers == 1:
        fleet = Single(made)
    elif router == "pools":
        fleet = Pooled(made, alloc or AllocConfig(), events)
    else:
        plain: dict[str, type[Plain]] = {"round-robin": RoundRobin, "least-load": LeastLoad}
        fleet = plain[router](made)
    return simulate(workload, fleet, events, chunk=chunk, until_s=until_s)
