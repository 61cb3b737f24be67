"""(L, B) CUDA-graph cells for batched short prefills, beside SGLang's own prefill graphs [L s3.1].

Requests are packed end to end; a cell pads only rows at the end and request slots. ``laps_core/buckets.py`` says
which cells exist and which one pays; here they are captured through SGLang's full-graph runner and replayed.

``install`` hooks two methods of ``ModelRunner`` (``HOOKS``). What else of SGLang is used: ``USES``.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from sglang_laps.support import off_reason, resolved

if TYPE_CHECKING:
    from laps_core.buckets import Predict
    from laps_core.config import LapsConfig

    from sglang_laps.graphs.front import PrefillFront

logger = logging.getLogger(__name__)

MODEL_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"

HOOKS = (
    (f"{MODEL_RUNNER}.init_cuda_graphs", "after: capture the cells, put the front before the prefill graph runner"),
    (f"{MODEL_RUNNER}.forward", "around: time short prefills on either path"),
)
"""Hooked names, and what for."""

USES = (
    ("model_executor.runner.prefill_cuda_graph_runner.PrefillCudaGraphRunner", "subclassed, graphs/runner.py"),
    ("model_executor.runner_backend.full_cuda_graph_backend.FullCudaGraphBackend", "used; subclassed for emulation"),
    ("model_executor.model_runner_components.cuda_graph_setup.capture_prefill_graph", "called with that subclass"),
    ("layers.attention.flashattention_backend.FlashAttentionBackend", "full_cg_prefill_* attributes swapped"),
    ("layers.attention.flashinfer_backend.FlashInferAttnBackend", "full_cg_prefill_* attributes swapped"),
)
"""Further SGLang names (under ``sglang.srt``) and what is done with them."""

FULL_GRAPH_BACKEND = "sglang_laps.graphs.backend:EmulatedGraphBackend"
"""What a platform without graph capture returns from ``get_full_graph_backend_cls`` to emulate it."""


def install(config: LapsConfig) -> None:
    """Register the hooks, if ``config.graphs``. Call while plugins are being loaded in a scheduler process."""
    if not config.graphs:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def captured(result: Any, model_runner: Any, *args: Any, **kwargs: Any) -> Any:
        if off_reason(resolved(model_runner.server_args)) is None:
            attach(model_runner, config)
        return result

    HookRegistry.register(f"{MODEL_RUNNER}.init_cuda_graphs", captured, HookType.AFTER)
    HookRegistry.register(f"{MODEL_RUNNER}.forward", timed_forward, HookType.AROUND)


def timed_forward(forward: Any, model_runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
    """``ModelRunner.forward``, measured when the batch is one the cells cover."""
    front = front_of(model_runner)
    if front is None or not forward_batch.forward_mode.is_extend():
        return forward(model_runner, forward_batch, *args, **kwargs)
    with front.timed():
        return forward(model_runner, forward_batch, *args, **kwargs)


def attach(model_runner: Any, config: LapsConfig) -> PrefillFront | None:
    """Capture the cells of ``config`` and put them before the stock prefill runner; None, and one line, if they cannot.

    Call after ``model_runner.init_cuda_graphs()``.
    """
    from sglang_laps.graphs.front import build

    if model_runner.is_draft_worker:
        return None
    front, reason = build(model_runner, config)
    if front is None:
        logger.warning("LAPS prefill graph cells are off: %s.", reason)
        model_runner.laps_graphs_off = reason
        return None
    model_runner.prefill_cuda_graph_runner = front
    return front


def front_of(model_runner: Any) -> PrefillFront | None:
    """The front of a model runner, or None if it has no cells."""
    from sglang_laps.graphs.front import PrefillFront

    front = getattr(model_runner, "prefill_cuda_graph_runner", None)
    return front if isinstance(front, PrefillFront) else None


def use_model(model_runner: Any, predict: Predict) -> None:
    """Estimate with ``predict``, the latency model of the *stock* path (do not fit it on replays)."""
    if front := front_of(model_runner):
        front.gains.predict = predict


def idle(model_runner: Any) -> None:
    """Replace dead cells by wanted ones. Call on every rank in the same rounds, and only with nothing in flight."""
    if front := front_of(model_runner):
        front.idle()


def replays(model_runner: Any) -> int:
    """Batches replayed from cells since start."""
    front = front_of(model_runner)
    return 0 if front is None else front.demand.hits


def status(model_runner: Any) -> dict[str, Any]:
    """What ``/laps_status`` shows of the cells (JSON-ready)."""
    if front := front_of(model_runner):
        return front.status()
    return {"on": False, "why": getattr(model_runner, "laps_graphs_off", "not enabled")}
