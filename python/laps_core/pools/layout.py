"""Whether a fleet is better off with two pools or undivided, and how large the pools are to be.

What two pools cost is told by queueing: a wait that n servers share is shorter than that of any part of them under the
same load, and a small pool wastes what of a server its class does not need. What they bring is that short requests do
not meet long ones. LAPS servers park long prefills, so a short one hardly waits there until every server has long work
at once; stock servers make it wait for all that came before.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from laps_core.pools.pressure import Work

GAIN_PARKS, GAIN_STOCK = 0.6, 0.2
"""Two pools pay where requests would wait so long in the undivided fleet, on servers that park and on others (times
of one long request)."""
LEAST = 0.8
"""Short work of less than this share of a whole pool is not worth one (0..1)."""
LOSS = 1.2
"""Most that two pools may lengthen the time of long requests (ratio)."""
HYSTERESIS = 0.4, 1.5
"""A fleet that is divided stays so until the gain is down to so much of that, or the loss is so many times that."""
FEWEST = 3
"""Servers of a fleet that is divided at all: of two each would be a pool that nobody shares."""


def wait(need: float, servers: int) -> float:
    """Mean wait behind ``servers`` that are offered ``need`` servers' worth of work (times of one request; M/M/n after
    Sakasegawa); infinite where they cannot do it."""
    load = need / servers
    if load >= 1.0:
        return math.inf
    return float(load ** (math.sqrt(2.0 * (servers + 1)) - 1.0) / (servers * (1.0 - load)))


@dataclass(frozen=True, slots=True)
class Layout:
    """What suits a fleet: two pools, or none."""

    short: int | None
    """Servers of the short pool; None = undivided."""
    reason: str


def short_servers(need: Work, servers: int, n_min: int) -> int:
    """How many of ``servers`` the short pool is to have, so that both are as busy as can be."""
    total = need.short + need.long
    if not total:
        return servers // 2
    even = math.floor(servers * need.short / total)
    sizes = sorted({min(max(n, n_min), servers - n_min) for n in (even, even + 1)})
    return min(sizes, key=lambda n: max(need.short / n, need.long / (servers - n)))


def layout(need: Work, servers: int, n_min: int, *, parks: bool, divided: bool) -> Layout:
    """For ``servers`` healthy ones, of which each class needs ``need``. ``parks``: all of them run LAPS; ``divided``:
    how the fleet is now."""
    short, total = need.short, need.short + need.long
    n = short_servers(need, servers, n_min)
    gain, loss = HYSTERESIS if divided else (1.0, 1.0)
    together = wait(total, servers)
    if servers < max(FEWEST, 2 * n_min):
        return Layout(None, f"{servers} servers are too few for two pools")
    if parks and short < LEAST * n_min * (0.5 + gain / 2):
        return Layout(None, f"short work needs {short:.1f} of a server")
    if together < gain * (GAIN_PARKS if parks else GAIN_STOCK):
        return Layout(None, f"{total:.1f} of {servers} servers are enough for all requests")
    apart = wait(need.long, servers - n)
    if short >= n * loss or 1.0 + apart > LOSS * loss * (1.0 + together):
        return Layout(
            None, f"{n} + {servers - n} servers are too few for {short:.1f} + {need.long:.1f} that are needed"
        )
    return Layout(n, f"short work needs {short:.1f} of {servers} servers, long work {need.long:.1f}")
