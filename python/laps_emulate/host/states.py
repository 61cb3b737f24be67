"""Corrections of SGLang's models with states (linear attention, state spaces), for machines without a GPU."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from laps_emulate.host import linear_attention, linear_drafts, mamba
from laps_emulate.host.corrections import loaded, pin_nothing

ATTENTION = "sglang.srt.layers.attention"


def recur_without_triton(model: torch.nn.Module) -> None:
    """Run linear attention (gated delta rule) without the Triton kernels that SGLang uses outside its CPU engine."""
    if not any(type(module).__name__ == "RadixLinearAttention" for module in model.modules()):
        return
    module: Any = importlib.import_module(f"{ATTENTION}.linear.gdn_backend")
    module.causal_conv1d_fn = linear_attention.convolve
    module.causal_conv1d_update = linear_drafts.convolve
    module.fused_gdn_gating = linear_attention.gates
    module = importlib.import_module(f"{ATTENTION}.linear.kernels.gdn_triton")
    module.chunk_gated_delta_rule = linear_attention.prefill
    module.fused_recurrent_gated_delta_rule_packed_decode = linear_attention.decode
    module.fused_sigmoid_gating_delta_rule_update = linear_drafts.verify
    _keep_states()
    norms: Any = importlib.import_module("sglang.kernels.ops.attention.fla.fused_norm_gate")
    norms.rms_norm_gated = linear_attention.norm
    norms = importlib.import_module("sglang.kernels.ops.attention.fla.layernorm_gated")
    norms.layernorm_fn = linear_attention.norm_gated
    if module := loaded("sglang.srt.models.qwen3_next"):
        module._is_cpu = True
    if module := loaded("sglang.srt.models.qwen3_5"):
        module._GDN_FUSED_QKVZBA_RATIOS = ()
        module.fused_sigmoid_mul = gated


def scan_without_triton(model: torch.nn.Module) -> None:
    """Run state space models (Mamba 2) without Triton, and without CUDA kernels that do not exist on a CPU."""
    if not any(type(module).__name__ == "MambaMixer2" for module in model.modules()):
        return
    module: Any = importlib.import_module(f"{ATTENTION}.mamba.mamba")
    for kind in ("", "_triton"):
        setattr(module, f"causal_conv1d_fn{kind}", linear_attention.convolve)
        setattr(module, f"causal_conv1d_update{kind}", linear_drafts.convolve)
    module.mamba_chunk_scan_combined = mamba.scan
    module.selective_state_update = mamba.update
    _keep_states()


def convolve_without_triton(model: torch.nn.Module) -> None:
    """Run short convolutions (LFM2) without Triton and CUDA kernels."""
    if not any(type(module).__name__ in ("Lfm2ShortConv", "Lfm2MoeShortConv") for module in model.modules()):
        return
    for name in ("lfm2", "lfm2_moe"):
        if module := loaded(f"sglang.srt.models.{name}"):
            module.causal_conv1d_fn = linear_attention.convolve
            module.causal_conv1d_update = linear_drafts.convolve
    pin_nothing("sglang.srt.managers.schedule_batch")


def _keep_states() -> None:
    """Keep the states of requests without Triton: states for the prefix cache, and states after accepted tokens."""
    module: Any = importlib.import_module(f"{ATTENTION}.hybrid_linear_attn_backend")
    module.track_mamba_states_if_needed = linear_attention.keep
    module.track_mamba_states_all_layers = linear_attention.keep_in_all_layers
    module.scatter_mamba_states_after_mtp_verify = linear_drafts.accept
    # Batches pin the slot numbers of states without asking whether pinning works.
    pin_nothing("sglang.srt.managers.schedule_batch")


def gated(x: torch.Tensor, gate: torch.Tensor, **_: Any) -> torch.Tensor:
    """Return `x` [n, size] times the sigmoid of `gate`, which can have an axis of heads."""
    return x * torch.sigmoid(gate.reshape(x.shape))
