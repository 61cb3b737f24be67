"""The LAPS router and stock MiniLB: what they cost, how pools follow the load, what clients see behind them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmark.rig import servers

STOCK, LAPS = "stock", "laps"
BOTH = (STOCK, LAPS)
MODULES = {STOCK: "sglang_router.launch_router", LAPS: "sglang_router_laps.launch_router"}
FLAGS = {STOCK: (), LAPS: ("--enable-laps-alloc",)}


def routers(
    prefills: Sequence[servers.Server], decodes: Sequence[servers.Server], out: Path
) -> dict[str, servers.Server]:
    """Both (not started), in front of the same servers."""
    return {
        name: servers.minilb(
            prefills, decodes, out / "logs" / f"router-{name}.log", *FLAGS[name], module=MODULES[name], name=name
        )
        for name in BOTH
    }
