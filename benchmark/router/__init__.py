"""Comparison of the LAPS router, stock MiniLB and SGLang's Rust gateway: overhead and clients' TTFT."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import starmap
from pathlib import Path

from laps_plan.traffic.job import Job

from benchmark.load import Answer, Target, client
from benchmark.results import Column, Comparison, ttft_paths
from benchmark.rig import BUILT_IN, Device, flush, servers

STOCK, LAPS = "stock", "laps"
MANUAL = "gateway, manual"
MODULES = {STOCK: "sglang_router.launch_router", LAPS: "sglang_router_laps.launch_router"}
FLAGS = {STOCK: (), LAPS: ("--enable-laps-alloc",)}
POLICIES = {
    "gateway, bucket": ("--policy", "power_of_two", "--prefill-policy", "bucket"),
    "gateway, cache-aware": ("--policy", "power_of_two", "--prefill-policy", "cache_aware"),
    "gateway, power of two": ("--policy", "power_of_two"),
    MANUAL: ("--policy", "power_of_two", "--prefill-policy", "manual", "--assignment-mode", "min_load"),
}
"""Name of a gateway variant -> flags of SGLang's Rust gateway. MANUAL uses the header KEYED."""
ALL = (STOCK, LAPS, *(name for name in POLICIES if name != MANUAL))
KEYED = "x-smg-routing-key"
"""Header with the client's session name, for MANUAL and for LAPS."""
PATIENCE_S = 120.0
"""Longest wait for answers after the last request of a round (seconds)."""
TTFT = tuple(starmap(Column, ttft_paths(50, 90).items()))
"""Columns of TTFT (ms)."""


def best_other(seen: Comparison, kind: str, ours: Collection[str]) -> str:
    """Return the router with the least P90 TTFT of a class, without the routers in ``ours``."""
    best = seen.best((name for name in seen.rounds if name not in ours), kind, "p90_ms")
    assert best is not None
    return best


def routers(
    prefills: Sequence[servers.Server], decodes: Sequence[servers.Server], out: Path, names: Sequence[str]
) -> dict[str, servers.Server]:
    """Return the routers called ``names`` (not started), in front of the same servers."""
    found = {}
    for name in names:
        log = servers.log_of(out, f"router-{name}")
        if policy := POLICIES.get(name):
            found[name] = servers.gateway(prefills, decodes, log, *policy, name=name)
        else:
            found[name] = servers.minilb(prefills, decodes, log, *FLAGS[name], module=MODULES[name], name=name)
    return found


@dataclass(frozen=True)
class Site:
    """Running routers, and the prefill servers behind all of them."""

    routers: dict[str, Target]
    prefills: list[Target]

    def replay(self, router: str, jobs: Sequence[Job], bodies: Sequence[bytes]) -> list[Answer]:
        """Send jobs through a router. The prefix caches are empty at first, so that no router profits from requests
        that came through another router."""
        for prefill in self.prefills:
            flush(prefill)
        return asyncio.run(client.replay(self.routers[router], jobs, bodies, PATIENCE_S))


@contextmanager
def site(
    device: Device,
    checkpoint: Path,
    variant: str,
    count: int,
    names: Sequence[str],
    out: Path,
    say: Callable[[str], None],
    *,
    prefill: Sequence[str] = (),
    decode: Sequence[str] = (),
) -> Iterator[Site]:
    """Run ``count`` prefill servers of a variant, a decode server, and the routers ``names`` in front of them.
    ``prefill``, ``decode``: further arguments. Raises ServerError."""
    args = ("--chunked-prefill-size", str(device.chunk), *device.args_of(BUILT_IN[variant]), *prefill)
    called = [f"{variant} {i}" for i in range(count)]
    prefills = [servers.prefill(checkpoint, servers.log_of(out, n), *args, env=device.env, name=n) for n in called]
    behind = servers.decode(checkpoint, servers.log_of(out, f"decode-{variant}"), *decode, env=device.env)
    up = routers(prefills, [behind], out / variant, names)
    say(f"starting {count} servers with {variant}")
    with servers.running(*prefills, behind, *up.values()):
        to = {name: Target(servers.HOST, router.port) for name, router in up.items()}
        yield Site(to, [Target(servers.HOST, p.port) for p in prefills])
