"""Every SGLang name that this package hooks, overrides or sets. See ``sglang_laps.seams``."""

from __future__ import annotations

from sglang_laps.seam_table import Seam

_SCHEDULER = "managers.scheduler.Scheduler"
_DRAFTS = (
    "eagle_utils.build_tree_kernel_efficient_func",
    "eagle_utils.verify_tree_greedy_func",
    "eagle_utils._is_cpu",
    "eagle_worker_common.assign_draft_cache_locs_contiguous_func",
    "eagle_worker_common.fill_bonus_tokens_func",
    "multi_layer_eagle_worker_v2._is_cpu",
    "multi_layer_eagle_worker_v2.rotate_input_ids",
    "spec_utils.fill_front_out_cache_loc_func",
    "spec_utils.fill_accept_out_cache_loc_func",
)
"""Functions that build and verify drafts, and a flag that they read."""

_STATES = (
    "layers.attention.linear.gdn_backend.causal_conv1d_fn",
    "layers.attention.linear.gdn_backend.causal_conv1d_update",
    "layers.attention.linear.gdn_backend.fused_gdn_gating",
    "layers.attention.linear.kernels.gdn_triton.chunk_gated_delta_rule",
    "layers.attention.linear.kernels.gdn_triton.fused_recurrent_gated_delta_rule_packed_decode",
    "layers.attention.linear.kernels.gdn_triton.fused_sigmoid_gating_delta_rule_update",
    "layers.attention.hybrid_linear_attn_backend.scatter_mamba_states_after_mtp_verify",
    "layers.attention.hybrid_linear_attn_backend.track_mamba_states_if_needed",
    "layers.attention.hybrid_linear_attn_backend.track_mamba_states_all_layers",
    "layers.attention.mamba.mamba.mamba_chunk_scan_combined",
    "layers.attention.mamba.mamba.selective_state_update",
    *(f"models.{model}.causal_conv1d_{kind}" for model in ("lfm2", "lfm2_moe") for kind in ("fn", "update")),
    "models.qwen3_next._is_cpu",
    "models.qwen3_5._GDN_FUSED_QKVZBA_RATIOS",
    "models.qwen3_5.fused_sigmoid_mul",
)
"""Kernels of linear attention and state spaces, and names by which models choose or call these kernels."""

SEAMS: tuple[Seam, ...] = (
    Seam("server_args.ServerArgs.add_cli_args", "hooked", "plugin", "parser"),
    Seam("server_args.ServerArgs.from_cli_args", "hooked", "plugin", "args"),
    Seam(
        "model_executor.model_runner.ModelRunner.forward",
        *("set", "device"),
        "self, forward_batch, skip_attn_backend_init=, pp_proxy_tensors=, reinit_attn_backend=, split_forward_count=",
    ),
    Seam(f"{_SCHEDULER}.init_model_worker", "hooked", "install", "self"),
    Seam(f"{_SCHEDULER}.init_overlap", "hooked", "install", "self"),
    Seam(f"{_SCHEDULER}.[device_module]", "set", "install", None),
    Seam(f"{_SCHEDULER}.run_batch", "hooked", "install", "self, batch, pp_proxy_tensors="),
    Seam(f"{_SCHEDULER}.get_internal_state", "hooked", "install", "self, recv_req"),
    *(
        Seam(f"layers.attention.torch_native_backend.TorchNativeAttnBackend.{n}", "set", "install", None)
        for n in ("_run_sdpa_forward_extend", "_run_sdpa_forward_decode")
    ),
    Seam("platforms.cpu.CpuDeviceMixin", "overridden", "host", None),
    Seam("platforms.interface.SRTPlatform", "overridden", "host", None),
    Seam("disaggregation.mooncake.conn.MooncakeKVSender.supports_host_tensor_indices", "set", "host", None),
    Seam("layers.attention.torch_native_backend.TorchNativeAttnBackend", "overridden", "host", None),
    Seam("mem_cache.memory_pool.MHATokenToKVPool", "overridden", "host", None),
    Seam("distributed.device_communicators.pynccl.PyNcclCommunicator", "set", "host", None),
    Seam("layers.moe.token_dispatcher.base.BaseDispatcher", "overridden", "host", None),
    Seam("layers.moe.fused_moe_triton.layer.create_moe_dispatcher", "set", "host", "moe_runner_config, quant_method"),
    Seam("layers.moe.fused_moe_native.moe_forward_native", "set", "host", "layer, x, topk_output, moe_runner_config"),
    Seam("batch_overlap.operations_strategy.torch", "set", "host", None),
    Seam("batch_overlap.operations_strategy.DeepEPConfig", "set", "host", None),
    Seam("layers.moe.ep_moe.layer.DeepEPMoE.[deprecate_flag]", "set", "host", None),
    Seam("layers.dp_attention.memcpy_func", "set", "host", None),
    Seam("managers.data_parallel_controller.sock_recv", "set", "host", "socket, flags="),
    Seam("model_executor.forward_batch_info._is_cpu", "set", "host", None),
    Seam("models.qwen2_moe.fused_gate_sigmoid_mul_add", "set", "host", None),
    Seam("layers.logits_processor.fused_softcap", "set", "host", None),
    Seam("speculative.draft_utils.DraftBackendFactory.create_draft_extend_backend", "set", "host", "self"),
    Seam("speculative.draft_utils.DraftBackendFactory.create_decode_backend", "set", "host", "self"),
    *(Seam(f"speculative.{name}", "set", "host", None) for name in _DRAFTS),
    *(Seam(name, "set", "host", None) for name in _STATES),
    Seam("mem_cache.allocation.assign_req_to_token_pool_func", "set", "host", None),
    Seam("managers.overlap_utils.gather_spec_extras", "set", "host", None),
    Seam("arg_groups.speculative_hook._disable_overlap_schedule_for_cpu", "set", "host", "server_args"),
)
