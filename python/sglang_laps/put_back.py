"""State that a batch sets up for itself in the pause of another, and its return to that of the paused one.

SGLang keeps this state once for a process or once for a model runner, and sets it up when a forward pass begins. All of
it is listed here; ``pauses`` puts back what the scheduler and its workers keep.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from sglang.srt.layers import dp_attention, layernorm_sp
from sglang.srt.model_executor import forward_context
from sglang.srt.runtime_context import ForwardFlags, get_forward

from sglang_laps import expert_counts

SET_IN_PASS = ("custom_mask", "mask_indptr", "image_token_ranges", "hpc_q_scale", "hpc_split_k_flag")
"""Fields of attention metadata that a pass sets, where a backend has them: Gemma's masks of pictures, Hunyuan's scales
of queries."""


@contextmanager
def aside(runner: Any) -> Iterator[None]:
    """Flags and context of the pass that is paused are out of the way, as between two passes."""
    context = forward_context.set_forward_context(None)
    try:
        with get_forward().scoped(**ForwardFlags._DEFAULTS), expert_counts.aside(runner):
            yield
    finally:
        forward_context.set_forward_context(context)


class Held(NamedTuple):
    """The part of a paused pass that cannot be set up again."""

    fields: dict[str, Any]
    """Fields of SET_IN_PASS that the pass has set, and their values."""
    rows: int
    """Tokens that are divided among ranks for layer normalization."""
    counts: expert_counts.Counts
    """How often each expert was chosen."""
    states: Any
    """Metadata of linear attention, and the slots that its batch keeps states in: SGLang translates them in place."""
    slots: Any


def hold(batch: Any) -> Held:
    """Return what is lost when another batch runs in a pause of `batch`, in whose forward pass this is called."""
    metadata, linear = _metadata(), _linear()
    fields = {name: value for name in SET_IN_PASS if (value := getattr(metadata, name, None)) is not None}
    rows, counts = layernorm_sp.sp_num_tokens(), expert_counts.hold()
    if linear is None:
        return Held(fields, rows, counts, None, None)
    return Held(fields, rows, counts, linear.forward_metadata, batch.mamba_track_indices)


def _metadata() -> Any:
    # The pass keeps the backend that it has begun with: adaptive speculative decoding may give its runner another.
    backend: Any = forward_context.get_attn_backend()
    return getattr(getattr(backend, "prefill_backend", backend), "forward_metadata", None)


def _linear() -> Any:
    return getattr(forward_context.get_attn_backend(), "linear_attn_backend", None)


def put_back(runner: Any, batch: Any, before: Held) -> None:
    """Set up for `batch`, the one that goes on, what another batch has set up for itself. `before`: what ``hold`` has
    returned."""
    layernorm_sp.set_sp_num_tokens(before.rows)
    expert_counts.put_back(before.counts)
    if batch.global_num_tokens_cpu is not None:
        # The lengths of what data-parallel ranks gather.
        dp_attention.set_dp_buffer_len_from_batch(batch)
        dp_attention.set_is_extend_in_batch(batch.is_extend_in_batch)
    if runner.lora_manager is not None:
        # Which rows meet which adapter.
        runner.lora_manager.prepare_lora_batch(batch)
    if batch.forward_mode.is_idle():
        return
    # Attention metadata: one object, or one set of buffers, for each backend.
    backend = forward_context.get_attn_backend()
    backend.init_forward_metadata(batch)
    # A batch may run as two parts, each with a backend of its own.
    parts = zip(backend.children, batch.tbo_children, strict=True) if batch.tbo_children else ()
    for of, its in ((backend, batch), *parts):
        if its.num_prefix_chunks is not None and hasattr(of, "init_mha_chunk_metadata"):
            # Latent attention has planned, in its first layer, how it reads the prefix.
            of.init_mha_chunk_metadata(its)
    for name, value in before.fields.items():
        setattr(_metadata(), name, value)
    if before.states is not None:
        _linear().forward_metadata, batch.mamba_track_indices = before.states, before.slots
