"""Deadlines for the first token: a request's own, or the server's default."""

from __future__ import annotations

import reprlib
from typing import TYPE_CHECKING, Any

from laps_core import deadline
from laps_core.protocol import DEADLINE_FIELD as FIELD

if TYPE_CHECKING:
    from laps_core.config import LapsConfig
    from laps_core.length import ClassName
    from sglang.srt.managers.schedule_batch import Req


def verify(params: Any, *_: Any) -> None:
    """Raise ValueError for a bad deadline, before ``SamplingParams.verify``; SGLang answers with status 400."""
    own = _own(params.custom_params)
    if own is not None and not deadline.valid(own):
        raise ValueError(f"sampling_params.custom_params.{FIELD}: {reprlib.repr(own)} is not {deadline.RANGE}")


def slo_s(req: Req, config: LapsConfig, kind: ClassName) -> float | None:
    """Return the seconds that a request of this class may take to its first token; None = no deadline.

    Some requests reach a scheduler without ``verify`` (over gRPC): here a bad deadline is ignored.
    """
    own = _own(req.sampling_params.custom_params)
    return own / 1e3 if deadline.valid(own) else config.deadline_s(kind)


def _own(custom: Any) -> Any:
    return custom.get(FIELD) if isinstance(custom, dict) else None


def arrival(req: Req, now: float) -> float:
    """Return when the request reached its scheduler (``time.perf_counter`` of this process); ``now`` if unknown.

    SGLang writes 0.0 for an unknown time. It cannot count as a time, because the clock may have started a minute ago.
    """
    received: float = req.time_stats.scheduler_recv_time
    return received if 0.0 < received <= now else now
