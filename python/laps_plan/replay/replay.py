"""Simulation of a recording under other policies: with the same arrivals and the server's own latency model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from laps_core.config import ConfigError, LapsConfig, format_value
from laps_core.length import CLASSES

from laps_plan.profile import Profile
from laps_plan.sim.metrics import Floats, lone_s
from laps_plan.sim.stock import POLICIES
from laps_plan.sim.variants import LAPS, run
from laps_plan.traffic.job import Job
from laps_plan.traffic.recording import Head, Recorded, Recording
from laps_plan.traffic.streams import Trace

HERE = "here"
"""Name of the server's own policy."""
FEWEST = 10
"""Minimum requests of a replay."""
LAYERS = 32
"""Layers of a server whose recording does not state them."""
UNLIMITED = 1 << 30
"""Chunk size (tokens) from which on prompts are not chunked."""
_UNUSED = ("profile", "graphs")
"""Knobs that a simulation does not use."""
_QUICKEST = 0.1
"""Quantile of the time beyond the model's, taken as the time of a request that waited for nothing."""


@dataclass(frozen=True)
class Policy:
    """One way to serve. ``kind``: a policy of SGLang, or LAPS with these knobs."""

    name: str
    kind: str
    knobs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Replayed:
    """A recording under one policy."""

    policy: Policy
    ttft_ms: Floats
    """TTFT of each request, in the order of the recording."""


def policies(config: LapsConfig) -> list[Policy]:
    """Return all policies under which a recording is run: SGLang's own, the server's, and changes of one of its knobs,
    except those that would change nothing."""
    own = {k: v for k, v in config.as_dict().items() if k not in _UNUSED}
    threshold = config.length_threshold
    wanted: list[tuple[str, Any]] = [
        ("wait_window_ms", 0.0),
        ("wait_window_ms", 2.0 * config.wait_window_ms),
        ("guard", 0.0),
        ("guard", min(1.0, 2.0 * config.guard)),
        ("preempt_overhead", max(0.01, config.preempt_overhead / 2)),
        ("preempt_overhead", min(1.0, 2.0 * config.preempt_overhead)),
        ("slice_ms", 0.0),
        ("order", "fcfs"),
    ]
    if isinstance(threshold, int):
        wanted += [("length_threshold", max(1, threshold // 2)), ("length_threshold", 2 * threshold)]
    changed = [
        Policy(f"{key} {format_value(value)}", LAPS, {**own, key: value}) for key, value in wanted if own[key] != value
    ]
    return [*(Policy(name, name) for name in POLICIES), Policy(HERE, LAPS, own), *changed]


def config_of(recording: Recording) -> LapsConfig:
    """Return the knobs of the server. Raises ValueError (one line) if this release does not know them."""
    known: dict[str, Any] = {
        k: tuple(v) if isinstance(v, list) else v for k, v in recording.head.config.items() if k not in _UNUSED
    }
    try:
        return LapsConfig(**known)
    except (ConfigError, TypeError) as e:
        raise ValueError(f"knobs of the recording: {e}") from None


def profile_of(recording: Recording) -> Profile:
    """Return the profile of the server: its own latency model, and the host's time as far as the requests show it."""
    head, requests = recording.head, recording.requests
    host = [r.host_ms for r in requests if r.host_ms is not None]
    # Host time is hidden while other requests use the device: only requests that found it idle show host time.
    shown = [ms for ms in host if ms > 0.0]
    bare = Profile(
        name="recorded", source="a recording", coefficients=head.model, poll_s=5e-5,
        layers=head.layers or LAYERS, slices_launch_s=head.launch_s,
        # If launching takes time of its own, the host is a slice ahead of the device.
        ahead=head.launch_s > 0.0,
    )  # fmt: skip
    if host:
        return replace(bare, step_host_s=float(np.median(shown)) / 1e3 if shown else 0.0)
    new, cached = ([getattr(r, name) for r in requests] for name in ("new_tokens", "cached_tokens"))
    beyond = np.array([r.ttft_ms for r in requests]) / 1e3 - lone_s(bare, new, cached, _chunk(head))
    return replace(bare, reply_s=max(0.0, float(np.quantile(beyond, _QUICKEST))))


def _chunk(head: Head) -> int | None:
    return head.chunk if head.chunk < UNLIMITED else None


def replay(recording: Recording, wanted: Sequence[Policy] | None = None) -> list[Replayed]:
    """Simulate the recording under the `wanted` policies; None = all ``policies``.

    Raises ValueError (one line) if the recording has too few requests, or its knobs are unknown.
    """
    if len(recording.requests) < FEWEST:
        raise ValueError(f"{len(recording.requests)} requests in the recording: at least {FEWEST} are needed")
    config, profile = config_of(recording), profile_of(recording)
    wanted = policies(config) if wanted is None else wanted
    return [Replayed(policy, _ttft_ms(recording, policy, profile)) for policy in wanted]


def _ttft_ms(recording: Recording, policy: Policy, profile: Profile) -> Floats:
    head, requests = recording.head, recording.requests
    found = np.array([(r.before_ms or 0.0) + (r.after_ms or 0.0) for r in requests])
    knobs = {**policy.knobs, **({} if head.layers else {"slice_ms": 0.0})}
    for rank in sorted({r.rank for r in requests}):
        jobs = sorted((_job(i, r) for i, r in enumerate(requests) if r.rank == rank), key=lambda job: job.at_s)
        outcome = run(policy.kind, Trace(jobs), profile, chunk=_chunk(head), knobs=knobs, overlap=head.overlap)
        record = outcome.record
        for i, ttft_s in zip(record.client, record.ttft, strict=True):
            found[i] += 1e3 * ttft_s
    return found


def _job(i: int, r: Recorded) -> Job:
    # The client's number is the index of the request in the recording.
    at_s = (r.arrival_ms + (r.before_ms or 0.0)) / 1e3
    return Job(at_s, r.new_tokens, r.cached_tokens, client=i, output=max(1, r.output_tokens))


def quantiles(recording: Recording, ttft_ms: Sequence[float] | Floats) -> dict[str, dict[str, float]]:
    """Return P50, P90 and mean (milliseconds) of each recorded class that has requests."""
    times, kinds = np.asarray(ttft_ms, dtype=float), np.array([r.cls for r in recording.requests])
    found: dict[str, dict[str, float]] = {}
    for cls in CLASSES:
        own = times[kinds == cls]
        if len(own):
            p50, p90 = np.percentile(own, (50, 90))
            found[cls] = {"p50": float(p50), "p90": float(p90), "mean": float(own.mean()), "requests": len(own)}
    return found
