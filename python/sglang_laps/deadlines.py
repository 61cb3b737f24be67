"""Deadlines for the first token: a request's own, or the server's default."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang.srt.managers.schedule_batch import Req

    from sglang_laps.policy.config import LapsConfig

FIELD = "ttft_slo_ms"
"""Key in ``sampling_params.custom_params``: milliseconds from arrival to the first token."""
_OLDEST_S = 3600.0


def wrong(value: Any) -> str | None:
    """What is wrong with a request's deadline, or None."""
    ok = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value > 0
    return None if ok else f"sampling_params.custom_params.{FIELD}: {value!r} is not a number of milliseconds > 0"


def verify(original: Callable[..., Any], params: Any, *args: Any, **kwargs: Any) -> Any:
    """Around ``SamplingParams.verify``: a bad deadline is a bad request. Raises ValueError; SGLang answers it 400."""
    custom = params.custom_params
    if isinstance(custom, dict) and custom.get(FIELD) is not None and (reason := wrong(custom[FIELD])):
        raise ValueError(reason)
    return original(params, *args, **kwargs)


def slo_s(req: Req, config: LapsConfig) -> float | None:
    """Seconds a request may take to its first token; None = no deadline."""
    custom = req.sampling_params.custom_params
    own = custom.get(FIELD) if isinstance(custom, dict) else None
    ms = own if own is not None and wrong(own) is None else config.ttft_slo_ms
    return None if ms is None else ms / 1e3


def arrival(req: Req, now: float) -> float:
    """When the request reached the server, or its scheduler where the HTTP side left no time (``time.perf_counter``).

    An HTTP side on another machine has another clock: its times are taken only where they are plausible.
    """
    times = (req.time_stats.created_time, req.time_stats.scheduler_recv_time)
    return next((float(t) for t in times if now - _OLDEST_S < t <= now), now)
