"""Reasons why passes of a server, or of its encoders, cannot run in slices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.environ import envs
from sglang.srt.model_executor.cuda_graph_config import Backend
from sglang.srt.runtime_context import get_exec, get_global_dwdp_manager, get_memory, get_parallel
from sglang.srt.utils.offloader import NoopOffloader, get_offloader

from sglang_laps.passes.cutter import Cutter
from sglang_laps.passes.layers import NoLayers, decoder_layers

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler

SHARED_OUTPUTS = ("flashinfer_megamoe", "mori")
"""Back ends of experts whose output is valid only until the next layer of any pass; a pass that pauses before a layer
still holds the output of the layer before it."""


def why_not(scheduler: Scheduler, emulated: Cutter | None, *, together: bool = False) -> str | None:
    """Return why this server's long batches cannot run in slices, or None. The same on every rank. `emulated`: emulated
    device with the layers of its profile, if any. `together`: data-parallel ranks plan their steps together."""
    if reason := _refused(scheduler, together=together):
        return reason
    if emulated is not None:
        return None
    runner = scheduler.tp_worker.model_runner
    try:
        decoder_layers(runner.model)
    except NoLayers as e:
        return str(e)
    return _keeps(runner)


def _keeps(runner: Any) -> str | None:
    """Return the state of a pass that this model or its attention keeps and that another batch would overwrite, or
    None. Found by reading SGLang's code, because these models need a GPU."""
    model = runner.model
    name = type(model).__name__

    def some_module_has(field: str) -> bool:
        return any(getattr(m, field, None) is not None for m in model.modules())

    checks = (
        # Kimi K3. On Blackwell, the residuals also share one buffer.
        (some_module_has("attn_bank"), "one bank of residuals"),
        # Qwen4 with embeddings on the host.
        (some_module_has("_prefetch_stream"), "embeddings fetched for the next layer"),
        # Inkling.
        (
            ".inkling" in type(model).__module__ and get_parallel().tp_size > 1,
            "partial sums that the next layer completes",
        ),
        # DeepSeek V4.1.
        (bool(getattr(runner.attn_backend, "low_ratios", ())), "what its indexers have found for other layers"),
    )
    return next((f"{name} keeps {what}" for hit, what in checks if hit), None)


def _refused(scheduler: Scheduler, *, together: bool) -> str | None:
    """Return why the configuration of this server allows no slices, or None."""
    runner, execution, spec = scheduler.tp_worker.model_runner, get_exec(), scheduler.spec_algorithm
    parallel = get_parallel()
    # With one data-parallel rank, all ranks run the same batch, which the leading rank has chosen.
    ranks_meet = scheduler.require_mlp_sync and parallel.attn_dp_size > 1
    checks = (
        (not scheduler.is_generation, "the model does not generate"),
        (parallel.pp_size > 1, "a pause of one pipeline stage would stop the others"),
        (parallel.attn_cp_size > 1, "context-parallel ranks divide a pass among them"),
        (ranks_meet and not together, "data-parallel ranks synchronize in every layer and do not plan together"),
        (not (spec.is_none() or spec.is_eagle() or spec.is_standalone()), f"speculative decoding with {spec.name}"),
        (scheduler.enable_unified_memory, "--enable-unified-memory moves KV while a pass is paused"),
        (parallel.enable_kv_cache_sharding, "--enable-kv-cache-sharding fetches prefixes layer by layer"),
        (scheduler.enable_pdmux, "--enable-pdmux divides the device by itself"),
        (
            execution.overlap.enable_two_batch_overlap and parallel.attn_tp_size > 1,
            "--enable-two-batch-overlap, with ranks that share the attention of a request",
        ),
        (execution.graph.cuda_graph_config.prefill.backend == Backend.TC_PIECEWISE, "the model is compiled"),
        (scheduler.enable_lora_overlap_loading, "--enable-lora-overlap-loading"),
        (execution.moe.elastic_ep_backend is not None, "--elastic-ep-backend: ranks come and go at the end of a pass"),
        (runner.canary_manager is not None, "--kv-canary"),
        (runner.msprobe_debugger is not None, "msprobe"),
        (
            scheduler.server_args.debug_tensor_dump_output_folder is not None,
            "--debug-tensor-dump-output-folder keeps the tensors of one pass",
        ),
        (
            scheduler.enable_unified_cache_external_linker,
            "--enable-unified-cache-external-linker ends loads with a pass",
        ),
        (get_memory().enable_flexkv, "--enable-flexkv loads prefixes layer by layer"),
        (
            execution.moe.moe_a2a_backend in SHARED_OUTPUTS,
            f"--moe-a2a-backend {execution.moe.moe_a2a_backend}: layers share one buffer for the output of experts",
        ),
        (bool(execution.moe.kt_max_deferred_experts_per_token), "--kt-max-deferred-experts-per-token"),
        (scheduler.device == "npu", "NPUs keep the positions of a pass in the rotary embedding"),
        (get_global_dwdp_manager() is not None, "distributed weights are fetched layer by layer"),
        (not isinstance(get_offloader(), NoopOffloader), "weights are loaded from the host layer by layer"),
    )
    return next((why for hit, why in checks if hit), None)


def encodes_layer_by_layer(runner: Any) -> bool:
    """Return True if encoders call their layers one by one as modules, with the same rows on every rank."""
    return not (runner.server_args.mm_enable_dp_encoder or envs.SGLANG_VIT_ENABLE_CUDA_GRAPH.get())
