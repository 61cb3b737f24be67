"""The LAPS router, stock MiniLB and SGLang's Rust gateway: overhead, pools that follow the load, and clients' TTFT."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmark.results.metrics import KINDS
from benchmark.results.seen import Column
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
"""Name of a gateway variant -> flags of SGLang's Rust gateway."""
ALL = (*BOTH, *POLICIES)
KEYED = "x-smg-routing-key"
"""Header with the client's session name, for the gateway's manual policy and for LAPS."""
BY_KEY = {
    "gateway, manual": ("--policy", "power_of_two", "--prefill-policy", "manual", "--assignment-mode", "min_load")
}
"""Gateway policies that use that header."""
TTFT = tuple(
    Column(f"{kind} {name}", (kind, key)) for kind in KINDS for name, key in (("P50", "p50_ms"), ("P90", "p90_ms"))
)
"""Columns of TTFT (ms)."""


def routers(
    prefills: Sequence[servers.Server],
    decodes: Sequence[servers.Server],
    out: Path,
    names: Sequence[str] = BOTH,
) -> dict[str, servers.Server]:
    """Return the routers called ``names`` (not started), in front of the same servers."""
    found = {}
    for name in names:
        log = out / "logs" / f"router-{name.replace(', ', '-').replace(' ', '-')}.log"
        if policy := {**POLICIES, **BY_KEY}.get(name):
            found[name] = servers.gateway(prefills, decodes, log, *policy, name=name)
        else:
            found[name] = servers.minilb(prefills, decodes, log, *FLAGS[name], module=MODULES[name], name=name)
    return found
