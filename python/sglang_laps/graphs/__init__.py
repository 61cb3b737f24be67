"""Full CUDA graphs for batches of short prefills, beside SGLang's own prefill graphs (LAPS, s3.1).

One more ``PrefillCudaGraphRunner`` of SGLang, as it is, captures a ladder of row counts under the full backend. Both
paths are timed at start; a batch then goes the way that was faster. ``laps_core/ladder.py`` holds the policy.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from sglang_laps import seams
from sglang_laps.support import no_prefill_server, resolved

if TYPE_CHECKING:
    from laps_core.config import LapsConfig

logger = logging.getLogger(__name__)

CAPTURED = "model_executor.model_runner.ModelRunner.init_cuda_graphs"
"""Hooked: after it, SGLang's own graphs are captured."""

ATTENTION: dict[str, tuple[str, ...]] = {"cuda": ("FlashAttentionBackend",)}
"""By device: attention backends whose metadata for many request slots outlives a capture. Tests run this one's."""


def install(config: LapsConfig) -> None:
    """Register the hook, if ``config.graphs``. Call while plugins are being loaded in a scheduler process."""
    if not config.graphs:
        return

    def captured(result: Any, model_runner: Any, *args: Any, **kwargs: Any) -> Any:
        if no_prefill_server(resolved(model_runner.server_args)) is None and not model_runner.is_draft_worker:
            attach(model_runner, config)
        return result

    seams.hook(CAPTURED, captured, "AFTER")


def attach(model_runner: Any, config: LapsConfig) -> None:
    """Capture, time, and put a front before the stock runner; one line where that cannot be. On all ranks, after
    ``model_runner.init_cuda_graphs()``, with nothing served yet."""
    from sglang_laps.graphs.capture import build

    model_runner.laps_graphs = built = build(model_runner, config, ATTENTION)
    if isinstance(built, str):
        logger.warning("LAPS prefill graphs are off: %s.", built)
    else:
        model_runner.prefill_cuda_graph_runner = built


def replays(model_runner: Any) -> int:
    """Batches replayed since start."""
    return int(getattr(getattr(model_runner, "laps_graphs", None), "replayed", 0))


def status(model_runner: Any) -> dict[str, Any]:
    """Return what ``/laps_status`` shows of the graphs (JSON-ready)."""
    built = getattr(model_runner, "laps_graphs", "not enabled")
    return {"on": False, "why": built} if isinstance(built, str) else built.status()
