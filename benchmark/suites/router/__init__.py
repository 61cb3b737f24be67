"""The LAPS router, stock MiniLB and SGLang's Rust gateway: what they cost, how pools follow, what clients see."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmark.rig import servers

STOCK, LAPS = "stock", "laps"
BOTH = (STOCK, LAPS)
MODULES = {STOCK: "sglang_router.launch_router", LAPS: "sglang_router_laps.launch_router"}
FLAGS = {STOCK: (), LAPS: ("--enable-laps-alloc",)}
POLICIES = {
    "gateway, bucket": ("--policy", "power_of_two", "--prefill-policy", "bucket"),
    "gateway, cache-aware": ("--policy", "power_of_two", "--prefill-policy", "cache_aware"),
    "gateway, power of two": ("--policy", "power_of_two"),
}
"""Of SGLang's Rust gateway: how they are called here -> flags."""
ALL = (*BOTH, *POLICIES)


def routers(
    prefills: Sequence[servers.Server],
    decodes: Sequence[servers.Server],
    out: Path,
    names: Sequence[str] = BOTH,
) -> dict[str, servers.Server]:
    """Each of ``names`` (not started), in front of the same servers."""
    found = {}
    for name in names:
        log = out / "logs" / f"router-{name.replace(', ', '-').replace(' ', '-')}.log"
        if name in POLICIES:
            found[name] = servers.gateway(prefills, decodes, log, *POLICIES[name], name=name)
        else:
            found[name] = servers.minilb(prefills, decodes, log, *FLAGS[name], module=MODULES[name], name=name)
    return found
