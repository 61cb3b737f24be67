"""Deadlines for the first token: a request's own, or the server's default."""

from __future__ import annotations

import reprlib
from typing import TYPE_CHECKING, Any

from laps_core import deadline
from laps_core.protocol import DEADLINE_FIELD as FIELD

if TYPE_CHECKING:
    from collections.abc import Callable

    from laps_core.config import LapsConfig
    from laps_core.length import ClassName
    from sglang.srt.managers.schedule_batch import Req


def verify(original: Callable[..., Any], params: Any, *args: Any, **kwargs: Any) -> Any:
    """Around ``SamplingParams.verify``: a bad deadline is a bad request. Raises ValueError; SGLang answers it 400."""
    own = _own(params.custom_params)
    if own is not None and not deadline.valid(own):
        raise ValueError(f"sampling_params.custom_params.{FIELD}: {reprlib.repr(own)} is not {deadline.RANGE}")
    return original(params, *args, **kwargs)


def slo_s(req: Req, config: LapsConfig, kind: ClassName) -> float | None:
    """Seconds a request of this class may take to its first token; None = no deadline.

    Not every way into a scheduler passes ``verify`` (``sgl.Engine`` does not): a bad deadline counts as none here.
    """
    own = _own(req.sampling_params.custom_params)
    return own / 1e3 if deadline.valid(own) else config.deadline_s(kind)


def _own(custom: Any) -> Any:
    return custom.get(FIELD) if isinstance(custom, dict) else None


def arrival(req: Req, now: float) -> float:
    """When the request reached its scheduler (``time.perf_counter`` of this process); ``now`` where that is unknown.

    SGLang writes 0.0 for a time that it does not know. That is no time: the clock may have begun a minute ago.
    """
    received: float = req.time_stats.scheduler_recv_time
    return received if 0.0 < received <= now else now
