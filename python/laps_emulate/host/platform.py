"""SGLang on a machine without a GPU, as an out-of-tree platform: real servers, small models.

For development and tests. Active only if no accelerator is visible and no other platform was chosen.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import KVPoolKind, PlatformCapabilities, SRTPlatform

from laps_emulate.host import corrections, states

logger = logging.getLogger(__name__)

DEFAULTS: dict[str, Any] = {
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disaggregation_decode_retraction_backup": "cpu_tensor",
    "lora_backend": "torch_native",
    # Experts always run in PyTorch, but with other names gpt-oss takes a layout of weights that PyTorch cannot read.
    "moe_runner_backend": "triton",
}
"""Server arguments without a working default on a machine without a GPU; the user's values win."""
GPU_DEFAULTS = (None, "auto", "csgmv")
"""Values of these arguments if the user has chosen nothing, or something that needs a GPU."""
DRAFTS = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE")
"""Speculative algorithms that run on this platform."""


class HostPlatform(CpuDeviceMixin, SRTPlatform):
    """The CPU as a device that SGLang's stock wheel can serve on."""

    _enum = PlatformEnum.OOT
    capabilities = PlatformCapabilities()

    def get_default_attention_backend(self) -> str:
        """Return the only attention backend that needs no kernels of its own."""
        return DEFAULTS["attention_backend"]

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Fill the arguments of DEFAULTS that the user left open."""
        corrections.overlap_drafts()
        for name, value in DEFAULTS.items():
            if getattr(server_args, name) in GPU_DEFAULTS:
                setattr(server_args, name, value)

    def get_kv_pool_cls(self, *, kind: KVPoolKind) -> type | None:
        """Return the KV pool that works with drafts; None: SGLang's own pool."""
        if kind != "mha":
            return None
        from laps_emulate.host.pool import HostPool

        return HostPool

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        """Return True if the draft model of this algorithm runs here."""
        return algorithm in DRAFTS

    def get_speculative_cache_locs_fn(self) -> Any:
        """Return the function for the places in the KV cache to which a verification writes."""
        from laps_emulate.host import drafts

        return drafts.verified_places

    def support_mamba_cache_extra_buffer(self) -> bool:
        """Return True: states of linear attention are kept for the prefix cache."""
        return True

    def get_torch_profiler_activity_str(self) -> str:
        """Return a name that no other activity of a profile has: the CPU has one already, and a profile starts once."""
        return "HOST"

    def get_torch_profiler_activity(self) -> torch.profiler.ProfilerActivity:
        """Return what a profile of the device records."""
        return torch.profiler.ProfilerActivity.CPU

    def init_backend(self) -> None:
        """Log what this platform is, keep Mooncake from pinning memory through CUDA, and flush denormal numbers."""
        logger.warning("LAPS host platform: no GPU found, running on the CPU. For development, not for speed.")
        # After a prompt's first chunk SGLang's attention on a CPU computes with memory that was never written. Old
        # integers are denormal numbers there, and a step takes up to eight times as long.
        torch.set_flush_denormal(True)
        corrections.keep_mooncake_from_pinning()
        corrections.group_without_nccl()
        corrections.name_the_host()
        from laps_emulate.host import experts

        experts.compute_own_experts()
        experts.exchange_over_gloo()
        experts.overlap_two_batches()

    def post_load_model(self, model: torch.nn.Module) -> None:
        """Apply the corrections for models and their attention; by now SGLang has imported what the model needs."""
        from laps_emulate.host import experts

        for correct in corrections.OF_MODELS:
            correct()
        corrections.share_without_cuda(model)
        experts.compute_in_pytorch(model)
        states.recur_without_triton(model)
        states.scan_without_triton(model)
        states.convolve_without_triton(model)
