"""Corrections of SGLang code that assumes a GPU, for machines without a GPU: one function for each."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

import torch
from sglang_laps import compat


def keep_mooncake_from_pinning() -> None:
    """Keep Mooncake's sender from pinning host memory through CUDA."""
    try:
        mooncake = importlib.import_module("sglang.srt.disaggregation.mooncake.conn")
    except ImportError:
        return
    mooncake.MooncakeKVSender.supports_host_tensor_indices = False


def group_without_nccl() -> None:
    """Do without NCCL on SGLang 0.5.22, where tensor-parallel ranks use NCCL on every platform of a plugin."""
    if not compat.release().asks_for_nccl:
        module: Any = importlib.import_module("sglang.srt.distributed.device_communicators.pynccl")
        module.PyNcclCommunicator = lambda **_: None


def name_the_host() -> None:
    """Make the CPU the default of ``torch.get_device_module``. A PyTorch built for CUDA returns CUDA's module even
    without a driver, and a model of SGLang asks that module where its weights go."""
    found = torch.get_device_module

    @functools.cache  # as PyTorch's own function is: PyTorch's compiler expects that
    def module(device: Any = None) -> Any:
        return found("cpu" if device is None else device)

    torch.get_device_module = module


POLL_MS = 5
CONTROLLER = "sglang.srt.managers.data_parallel_controller"


def let_the_controller_wait() -> None:
    """Make the controller of data-parallel ranks wait up to POLL_MS for a message. Otherwise the controller polls its
    socket without a pause, and takes a core from the ranks."""
    module = loaded(CONTROLLER)
    if module is not None and not isinstance(module.sock_recv, Waiting):
        module.sock_recv = Waiting(module.sock_recv)


class Waiting:
    """Receives messages from a socket, and waits for up to POLL_MS even if the caller asks not to wait."""

    def __init__(self, receive: Callable[..., Any]) -> None:
        self._receive = receive

    def __call__(self, socket: Any, flags: int = 0) -> Any:
        """Return the next message. Raises ``zmq.Again`` if no message comes and ``flags`` say not to wait."""
        if flags:
            socket.poll(POLL_MS)
        return self._receive(socket, flags=flags)


def loaded(name: str) -> Any:
    """Return a module that SGLang has imported for its model, or None: other modules need no correction."""
    return sys.modules.get(name)


def attend_to_all() -> None:
    """Give the backend ``torch_native`` sinks, capped logits, and sliding windows in a pool of their own."""
    from sglang.srt.layers.attention import attention_registry

    if attention_registry.ATTENTION_BACKENDS["torch_native"] is not attention_registry.create_torch_native_backend:
        return  # another plugin's backend

    @attention_registry.register_attention_backend("torch_native")
    def create(runner: Any) -> Any:
        from laps_emulate.host.attention import HostAttention

        return HostAttention(runner)


def absorb_latent_attention() -> None:
    """Make DeepSeek's attention always take the absorbed form. For an unknown backend SGLang takes the form for Triton,
    which multiplies the latent out for a prompt's first chunk and writes KV with a Triton kernel."""
    if module := loaded("sglang.srt.models.deepseek_common.attention_backend_handler"):
        absorbed = module.AttnForwardMethod.MLA
        module.AttentionBackendRegistry.register("torch_native", lambda attention, batch: absorbed)


def gather_without_triton() -> None:
    """Copy rows of data-parallel attention without the Triton kernel that SGLang uses outside its CPU engine."""
    from sglang.srt.layers import dp_attention

    dp_attention.memcpy_func = dp_attention.memcpy_cpu


def gather_without_operators() -> None:
    """Gather decode steps of data-parallel ranks without operators that are registered for accelerators only."""
    coordinator: Any = importlib.import_module("sglang.srt.distributed.parallel_state").GroupCoordinator
    coordinator.all_gather_into_tensor = coordinator._all_gather_into_tensor
    coordinator.reduce_scatter_tensor = coordinator._reduce_scatter_tensor


def pin_no_token_counts() -> None:
    """Keep ``ForwardBatch.prepare_mlp_sync_batch`` from pinning memory, which it does outside SGLang's CPU engine
    without asking the platform."""
    from sglang.srt.model_executor import forward_batch_info

    forward_batch_info._is_cpu = True


def gate_shared_experts_without_triton() -> None:
    """Add the shared expert in Qwen2-MoE's block, which Qwen3-Next also has, without a Triton kernel."""
    if module := loaded("sglang.srt.models.qwen2_moe"):
        module.fused_gate_sigmoid_mul_add = add_gated


def add_gated(hidden: torch.Tensor, gate: torch.Tensor, shared: torch.Tensor, output: torch.Tensor) -> None:
    """Add `shared` [n, size], times a gate between 0 and 1 for each of the `hidden` states [n, size], to `output`."""
    output.addcmul_(torch.sigmoid(hidden @ gate).unsqueeze(-1), shared)


def cap_logits_without_triton() -> None:
    """Cap Gemma 2's logits without the Triton kernel that SGLang uses on every device but Ascend's."""
    from sglang.srt.layers import logits_processor

    logits_processor.fused_softcap = cap


def cap(logits: torch.Tensor, limit: float) -> torch.Tensor:
    """Press `logits` in place between `-limit` and `limit`."""
    return logits.div_(limit).tanh_().mul_(limit)


def share_without_cuda(model: Any) -> None:
    """Share embedding and head of a target with its draft without CUDA, for which DeepSeek's and GLM's methods wait."""
    inner: Any = getattr(model, "model", None)
    if not (hasattr(model, "set_embed_and_head") and hasattr(inner, "embed_tokens") and hasattr(model, "lm_head")):
        return

    def share(embedding: Any, head: Any) -> None:
        inner.embed_tokens.weight, model.lm_head.weight = embedding, head

    model.set_embed_and_head = share


def pin_no_adapters() -> None:
    """Keep LoRA's layers and PyTorch backend from pinning their small tensors. LoRA does not ask whether pinning works,
    and PyTorch would look for a CUDA driver."""
    from sglang.srt.runtime_context import get_lora

    if not get_lora().enable_lora:
        return
    pin_nothing("sglang.srt.lora.layers", "sglang.srt.lora.backend.torch_backend")


def pin_nothing(*modules: str) -> None:
    """Keep these modules from pinning new tensors, and ``Tensor.pin_memory`` from pinning existing tensors."""
    for name in modules:
        importlib.import_module(name).torch = Unpinned()  # type: ignore[attr-defined]
    # Without an accelerator this method only raises an error, so replacing it harms no other code.
    torch.Tensor.pin_memory = lambda tensor, *_: tensor  # type: ignore[method-assign,assignment,misc]


class Unpinned:
    """``torch`` as some modules of SGLang see it: new tensors are not pinned."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(torch, name)
        if name not in ("tensor", "empty", "zeros"):
            return found
        return lambda *values, pin_memory=False, **options: found(*values, **options)


def draft_with_native_attention() -> None:
    """Give a draft's passes the attention of the target; SGLang has none for drafts with ``torch_native``."""
    if module := loaded("sglang.srt.speculative.draft_utils"):
        module.DraftBackendFactory.create_draft_extend_backend = _draft_attention
        module.DraftBackendFactory.create_decode_backend = _draft_steps


def _draft_attention(factory: Any) -> Any:
    from laps_emulate.host.attention import HostAttention

    backend = HostAttention(factory.draft_model_runner)
    backend.prefill_attention_backend_str = backend.decode_attention_backend_str = "torch_native"
    return backend


def _draft_steps(factory: Any) -> Any:
    from laps_emulate.host.attention import DraftSteps

    steps = factory.speculative_num_steps
    return DraftSteps(factory.draft_model_runner, factory.topk, steps) if steps > 1 else None


def verify_drafts_without_triton() -> None:
    """Build and verify trees of drafts, and pass on the results, without Triton. As on CPUs that SGLang supports,
    verification is greedy at any temperature."""
    from laps_emulate.host import drafts

    if module := loaded("sglang.srt.speculative.eagle_utils"):
        module._is_cpu = True
        module.build_tree_kernel_efficient_func = drafts.build_tree
        module.verify_tree_greedy_func = drafts.verify_greedily
    if module := loaded("sglang.srt.speculative.eagle_worker_common"):
        module.assign_draft_cache_locs_contiguous_func = drafts.draft_places
        module.fill_bonus_tokens_func = drafts.last_tokens
    if module := loaded("sglang.srt.speculative.multi_layer_eagle_worker_v2"):
        module._is_cpu = True
        module.rotate_input_ids = drafts.shift_left
    if module := loaded("sglang.srt.speculative.spec_utils"):
        module.fill_front_out_cache_loc_func = drafts.front_places
        module.fill_accept_out_cache_loc_func = drafts.accepted_places
    if module := loaded("sglang.srt.mem_cache.allocation"):
        module.assign_req_to_token_pool_func = drafts.assign_places
    if module := loaded("sglang.srt.managers.overlap_utils"):
        module.gather_spec_extras = drafts.gather_rows


def overlap_drafts() -> None:
    """Keep the overlap loop with speculative decoding, which SGLang turns off on every CPU."""
    if module := loaded("sglang.srt.arg_groups.speculative_hook"):
        module._disable_overlap_schedule_for_cpu = lambda server_args: None


OF_MODELS = (
    attend_to_all,
    absorb_latent_attention,
    gather_without_triton,
    gather_without_operators,
    pin_no_token_counts,
    gate_shared_experts_without_triton,
    cap_logits_without_triton,
    pin_no_adapters,
    draft_with_native_attention,
    verify_drafts_without_triton,
)
"""Corrections to call once a model is loaded. A second call does no harm: a draft is a model, too."""
