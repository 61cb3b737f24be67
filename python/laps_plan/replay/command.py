"""``laps-plan --replay``: simulation of the requests of a running server, or of a recording, under other policies."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from laps_core.length import CLASSES

from laps_plan.replay.replay import HERE, Replayed, quantiles, replay
from laps_plan.replay.source import fetch
from laps_plan.traffic import recording as recordings
from laps_plan.traffic.recording import Recording

SLOWEST = 5
"""Slowest requests that are shown one by one."""
MEASURED = "measured"
NOTE = (
    "Simulated: the recorded arrivals and the server's own latency model. The row {here!r} has the server's own "
    "policy: what it differs from the measured row is the simulation's error."
)


def run(source: str, seconds: float, *, as_json: bool = False, record: Path | None = None) -> int:
    """Replay a server's last seconds, or a recording at a path, and print the outcome. Return exit code 2, and print
    one line, if that is not possible."""
    try:
        found = fetch(source, seconds) if "://" in source else recordings.read(Path(source))
        if record is not None:
            found.save(record)
        replayed = replay(found)
    except (ValueError, OSError) as e:
        print(f"laps-plan: {e}", file=sys.stderr)
        return 2
    if as_json:
        print(json.dumps(as_dict(found, replayed)), flush=True)
    else:
        print(text(found, replayed), flush=True)
    return 0


def as_dict(recording: Recording, replayed: list[Replayed]) -> dict[str, Any]:
    """Return all results (JSON-ready). Times in milliseconds."""
    measured = [r.ttft_ms for r in recording.requests]
    rows = [(MEASURED, {}, measured), *((r.policy.name, r.policy.knobs, r.ttft_ms.tolist()) for r in replayed)]
    return {
        "policies": [
            {"name": name, "knobs": dict(knobs), "sum_ms": round(float(np.sum(times)), 3),
             "classes": quantiles(recording, times)}
            for name, knobs, times in rows
        ],
        "requests": [
            {"arrival_ms": r.arrival_ms, "new_tokens": r.new_tokens, "cached_tokens": r.cached_tokens, "class": r.cls,
             "ttft_ms": {name: round(times[i], 3) for name, _, times in rows}}
            for i, r in enumerate(recording.requests)
        ],
    }  # fmt: skip


def text(recording: Recording, replayed: list[Replayed]) -> str:
    """Return the results as tables for people."""
    # A server's environment has the packages that JSON needs, but not those for tables.
    from laps_plan.table import Table

    measured = np.array([r.ttft_ms for r in recording.requests])
    columns = [(MEASURED, measured), *((r.policy.name, r.ttft_ms) for r in replayed)]
    heads = ["time to first token, ms", *(f"{cls} {q}" for cls in CLASSES for q in ("P50", "P90")), "mean", "sum s"]
    rows = [[name, *_figures(recording, times)] for name, times in columns]
    minutes = (recording.requests[-1].arrival_ms - recording.requests[0].arrival_ms) / 6e4
    title = f"{len(measured)} requests of {minutes:.1f} minutes"
    first = Table(title, heads, rows, NOTE.format(here=HERE))
    shown = [(name, times) for name, times in columns if " " not in name]
    slowest = np.argsort(-measured)[:SLOWEST]
    each = [[_name(recording, i), *(_ms(times[i]) for _, times in shown)] for i in slowest]
    second = Table("The slowest", ["at s: new + cached tokens", *(name for name, _ in shown)], each)
    return f"{first}\n\n{second}"


def _figures(recording: Recording, times: Any) -> list[str]:
    found = quantiles(recording, times)
    both = [_ms(found[cls][q]) if cls in found else "-" for cls in CLASSES for q in ("p50", "p90")]
    return [*both, _ms(float(np.mean(times))), f"{float(np.sum(times)) / 1e3:,.1f}"]


def _name(recording: Recording, i: int) -> str:
    r = recording.requests[i]
    return f"{r.arrival_ms / 1e3:.1f}: {r.new_tokens:,} + {r.cached_tokens:,}"


def _ms(value: float) -> str:
    return f"{value:,.0f}" if value >= 99.5 else f"{value:.1f}"
