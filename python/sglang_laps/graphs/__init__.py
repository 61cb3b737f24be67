"""Full CUDA graphs for batches of short prefills, beside SGLang's own prefill graphs (LAPS, s3.1).

A second, unchanged ``PrefillCudaGraphRunner`` of SGLang captures a ladder of row counts with the full backend. Both
paths are timed at start; each batch then takes the faster path. ``laps_core/ladder.py`` holds the policy.
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
"""Method that LAPS hooks: when it returns, SGLang's own graphs are captured."""

ATTENTION: dict[str, tuple[str, ...]] = {"cuda": ("FlashAttentionBackend",)}
"""Attention backends, by device, whose metadata for many request slots outlives a capture. Tests run this backend's."""


def install(config: LapsConfig) -> None:
    """Register the hook if ``config.graphs`` is set. Call this while a scheduler process loads its plugins."""
    if not config.graphs:
        return

    def captured(result: Any, model_runner: Any, *args: Any, **kwargs: Any) -> Any:
        if no_prefill_server(resolved(model_runner.server_args)) is None and not model_runner.is_draft_worker:
            attach(model_runner, config)
        return result

    seams.hook(CAPTURED, captured, "AFTER")


def attach(model_runner: Any, config: LapsConfig) -> None:
    """Capture and time the graphs, and put a front before the stock runner; log one line if the graphs are off. Call
    this on all ranks after ``model_runner.init_cuda_graphs()``, before the first request."""
    from sglang_laps.graphs.capture import build

    model_runner.laps_graphs = built = build(model_runner, config, ATTENTION)
    if isinstance(built, str):
        logger.warning("LAPS prefill graphs are off: %s.", built)
    else:
        model_runner.prefill_cuda_graph_runner = built


def replays(model_runner: Any) -> int:
    """Return the number of batches replayed since start."""
    return int(getattr(getattr(model_runner, "laps_graphs", None), "replayed", 0))


def status(model_runner: Any) -> dict[str, Any]:
    """Return what ``/laps_status`` shows of the graphs (JSON-ready)."""
    built = getattr(model_runner, "laps_graphs", "not enabled")
    return {"on": False, "why": built} if isinstance(built, str) else built.status()
