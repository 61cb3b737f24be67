"""Variants to compare: SGLang arguments under a name."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

FCFS, SPF = "fcfs", "shortest-prefill-first"
STOCK = (FCFS, "hrrn", SPF)
SMALL = f"{SPF}-2048"
"""Best stock setting without a latency model: small chunks, shortest prompts first."""
DUAL, LAPS, GRAPHS, PAPER = "laps-dual", "laps", "laps-graphs", "laps-paper"
ON = "--enable-laps-scheduler"
_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]*=")


@dataclass(frozen=True)
class Variant:
    """One way to start the prefill server."""

    name: str
    args: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    """Further environment variables of this server: PYTHONPATH can select another version of LAPS."""
    knobs: dict[str, Any] = field(default_factory=dict)
    """LAPS knobs, in addition to the device's."""

    @property
    def stock(self) -> bool:
        return ON not in self.args


BUILT_IN = {
    v.name: v
    for v in (
        *(Variant(policy, ("--schedule-policy", policy)) for policy in STOCK),
        Variant(SMALL, ("--schedule-policy", SPF, "--chunked-prefill-size", "2048")),
        Variant(DUAL, (ON,), knobs={"wait_window_ms": 0.0}),
        Variant(LAPS, (ON,)),
        Variant(GRAPHS, (ON, "--enable-batch-prefill-cuda-graph")),
        Variant(PAPER, (ON,), knobs={"preset": "paper"}),
    )
}


def given(text: str) -> Variant:
    """Parse ``NAME=[VARIABLE=VALUE ...] ARGS`` of a command line. Raises ValueError."""
    name, found, args = text.partition("=")
    if not found or not name or not args.strip():
        raise ValueError(f"{text!r} is not NAME='ARGS'")
    if name in BUILT_IN:
        raise ValueError(f"{name!r} is a built-in variant: choose another name")
    words = shlex.split(args)
    n = next((i for i, word in enumerate(words) if not _VARIABLE.match(word)), len(words))
    return Variant(name, tuple(words[n:]), dict(word.split("=", 1) for word in words[:n]))


def chosen(names: Sequence[str], more: Sequence[Variant], *, cuda: bool) -> list[Variant]:
    """Return the built-in variants of these names, then the user's own. Raises ValueError."""
    for name in names:
        if name not in BUILT_IN:
            raise ValueError(f"no variant {name!r}: {', '.join(BUILT_IN)}, or your own with --variant NAME='ARGS'")
        if name == GRAPHS and not cuda:
            raise ValueError(f"{GRAPHS} needs --device cuda: on a CPU there are no CUDA graphs")
    found = [*(BUILT_IN[n] for n in names), *more]
    twice = {v.name for v in found if sum(w.name == v.name for w in found) > 1}
    if twice:
        raise ValueError(f"variant {', '.join(sorted(twice))} is given twice")
    return found
