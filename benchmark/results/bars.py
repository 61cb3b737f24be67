"""Bars of all benchmarks: the range that each judged figure must lie in."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Bar:
    """Range for a figure."""

    most: float = math.inf
    least: float = -math.inf

    def met(self, value: float) -> bool:
        return self.least <= value <= self.most

    def __str__(self) -> str:
        if self.least == -math.inf:
            return f"<= {self.most:g}"
        return f">= {self.least:g}" if self.most == math.inf else f"{self.least:g}..{self.most:g}"


LONE = Bar(most=1.03)
"""TTFT of a lone request with a mechanism of LAPS, over the TTFT without the mechanism."""
CLOSED_WORST, CLOSED_BEST = Bar(least=0.98), Bar(least=1.05)
"""Requests/s of closed loops with LAPS over those without: at every number of clients, and at the best number."""

SHORT_P90, SHORT_P90_EVEN = Bar(most=0.5), Bar(most=0.8)
"""Short P90 TTFT over the best stock policy's. The second is for loads of all lengths or of mostly short prompts."""
NO_MORE = Bar(most=1.0)
KEPT = Bar(least=0.97)
"""Cached tokens behind a router, as a share of what one unlimited cache would have."""
AGENTS_BEHIND_ROUTER = Bar(most=0.7)
"""Short P90 TTFT of agents' turns behind the LAPS router over the gateway's best policy."""
LONG_P90_YIELDS = Bar(most=1.25)
"""Long P90 TTFT over fcfs on workloads with few long prompts, which wait for many shorter ones."""
THROUGHPUT = Bar(least=0.98)

COLOCATED_SHORT, COLOCATED_MEAN, COLOCATED_RATE = Bar(most=0.6), Bar(most=0.95), Bar(least=0.98)
"""Short P90, mean TTFT and requests/s of a server that also decodes, over the best stock setting whose streams wait no
longer than those of LAPS."""
COLOCATED_TBT, COLOCATED_LONG = Bar(most=0.2), Bar(most=1.3)
"""P99 between tokens and long P90 over the stock default."""
COLOCATED_P99, COLOCATED_LONGEST = Bar(most=1.2), Bar(most=2.0)
"""P99 and longest time between tokens, over the target."""
COLOCATED_MODELS = {
    "8b": (Bar(most=0.5), Bar(most=0.85), Bar(least=1.1)),
    "30b-a3b": (Bar(most=0.5), Bar(most=0.6), Bar(least=1.3)),
    "32b": (Bar(most=0.6), Bar(most=1.0), Bar(least=1.0)),
}
"""Short P90, mean TTFT, and requests/s at saturation, simulated, over the best stock setting whose streams wait no
longer than those of LAPS."""
COLOCATED_GOODPUT = Bar(least=1.3)
"""Requests/s with 90% of the requests in time, over the best stock setting."""

GOODPUT, GOODPUT_ORDER = Bar(least=1.5), Bar(least=1.1)
"""Goodput of a prefill server over the best stock policy's, and over that of the order ``s-edf``."""

GRAPHS_WORST, GRAPHS_BEST = Bar(least=0.98), Bar(least=1.15)
"""Requests/s with full graphs over those of stock, at the worst and at the best number of clients."""
PADDED, CAPTURE_S, CAPTURE_MIB = Bar(most=0.25), Bar(most=60.0), Bar(most=2048.0)
"""Full graphs: share of rows that are padding, and time and memory of their capture."""

ROUTER_RATE, ROUTER_P99 = Bar(least=2.0), Bar(most=1.0)
"""Requests/s and P99 latency of the router over stock MiniLB's."""
NO_LOSS = Bar(most=1.05)
"""P90 TTFT of either class behind the router, with two servers, over that behind stock MiniLB."""
BEHIND_ROUTER, BEHIND_ROUTER_LONG = Bar(most=0.5), Bar(most=1.1)
"""Short and long P90 TTFT behind the router over those behind the best other router."""


INSIDE = Bar(least=0.75, most=0.85)
"""Share of first tokens inside the quoted interval, which should hold 80%."""

STEP = Bar(least=0.97, most=1.03)
"""Duration of an emulated step over the duration in the profile."""
EMULATED = Bar(least=0.9, most=1.1)
"""Simulated over emulated TTFT."""
PLANNED = Bar(least=0.85, most=1.15)
"""The planner's figures over those of emulated servers."""
EMULATED_SHORT_P90, EMULATED_MEAN, EMULATED_SLOWDOWN = Bar(most=0.5), Bar(most=0.6), Bar(most=0.5)
"""LAPS over the best stock policy on an emulated device."""
EMULATED_RATE = Bar(least=1.0)
"""Emulated requests/s over fcfs."""
EMULATED_LONG_P90 = Bar(most=1.3)
"""Emulated long P90 over fcfs."""
