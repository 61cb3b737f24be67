"""Layout of a fleet: two pools or none, and the size of each pool.

Queueing theory gives the cost of two pools: requests wait less at n servers with a common queue than at a part of these
servers under the same load per server, and a small pool wastes capacity that its class does not need. The benefit is
that short requests do not wait for long ones. LAPS servers park long prefills, so a short request hardly waits unless
every server has long work at once. On stock servers a short request waits for all earlier requests.
"""

from __future__ import annotations

import math

from laps_core.pools.pressure import Work

GAIN_PARKS, GAIN_STOCK = 0.6, 0.2
"""Least mean wait in the undivided fleet from which two pools pay off, with LAPS servers and with stock servers
(multiples of the time of one long request)."""
LEAST = 0.8
"""Least short work for which a pool of LAPS servers pays off (share of that pool's capacity, 0..1)."""
LOSS = 1.2
"""Largest factor by which two pools may lengthen the time of long requests."""
HYSTERESIS = 0.4, 1.5
"""Factors on GAIN_* and on LOSS while the fleet is divided, so that it tends to stay divided."""
FEWEST = 3
"""Smallest fleet that is divided: with two servers each pool would have only one."""


def wait(need: float, servers: int) -> float:
    """Return the mean wait at ``servers`` with an offered load of ``need`` servers (times of one request; M/M/n after
    Sakasegawa); infinite if the servers are overloaded."""
    load = need / servers
    if load >= 1.0:
        return math.inf
    return float(load ** (math.sqrt(2.0 * (servers + 1)) - 1.0) / (servers * (1.0 - load)))


def short_servers(need: Work, servers: int, n_min: int) -> int:
    """Return the size of the short pool, out of ``servers``, at which the busier pool is least busy."""
    total = need.short + need.long
    if not total:
        return servers // 2
    even = math.floor(servers * need.short / total)
    sizes = sorted({min(max(n, n_min), servers - n_min) for n in (even, even + 1)})
    return min(sizes, key=lambda n: max(need.short / n, need.long / (servers - n)))


def layout(need: Work, servers: int, n_min: int, *, parks: bool, divided: bool) -> tuple[int | None, str]:
    """Return how many of ``servers`` healthy servers should be the short pool (None = undivided), and why. ``need``:
    servers that each class needs; ``parks``: all servers run LAPS; ``divided``: the fleet has two pools now."""
    short, total = need.short, need.short + need.long
    n = short_servers(need, servers, n_min)
    gain, loss = HYSTERESIS if divided else (1.0, 1.0)
    together = wait(total, servers)
    if servers < max(FEWEST, 2 * n_min):
        return None, f"{servers} servers are too few for two pools"
    if parks and short < LEAST * n_min * (0.5 + gain / 2):
        return None, f"short work needs {short:.1f} of a server"
    if together < gain * (GAIN_PARKS if parks else GAIN_STOCK):
        return None, f"{total:.1f} of {servers} servers are enough for all requests"
    apart = wait(need.long, servers - n)
    if short >= n * loss or 1.0 + apart > LOSS * loss * (1.0 + together):
        return None, f"{n} + {servers - n} servers cannot do the work of {short:.1f} + {need.long:.1f} servers"
    return n, f"short work needs {short:.1f} of {servers} servers, long work {need.long:.1f}"
