"""State that a batch in a pause sets up for itself, and its restoration for the paused batch.

SGLang keeps this state once per process or once per model runner, and sets it up when a forward pass starts. This
module lists all of it; ``pauses`` restores the state of the scheduler and its workers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from sglang.srt.eplb.expert_distribution import get_global_expert_distribution_recorder
from sglang.srt.layers import dp_attention, layernorm_sp
from sglang.srt.model_executor import forward_context
from sglang.srt.runtime_context import ForwardFlags, get_forward
from sglang.srt.state_capturer.indexer_topk import get_global_indexer_capturer
from sglang.srt.state_capturer.routed_experts import get_global_experts_capturer
from sglang.srt.utils.common import Withable

SET_IN_PASS = ("custom_mask", "mask_indptr", "image_token_ranges", "hpc_q_scale", "hpc_split_k_flag")
"""Fields of attention metadata that a pass sets, if its backend has them: Gemma's masks of pictures, Hunyuan's scales
of queries."""
UNUSED_TIMER = {"_in_wrap": False, "_observer": None}
"""Fields of SGLang's device timer between two passes. It refuses to time a pass inside another pass."""


@contextmanager
def aside(runner: Any) -> Iterator[None]:
    """Set aside the flags, the context and the timer of the paused pass, so that the state is as between two passes."""
    context = forward_context.set_forward_context(None)
    timer = vars(runner.device_timer) if runner.device_timer else {}
    running = {name: timer[name] for name in UNUSED_TIMER if name in timer}
    timer.update({name: UNUSED_TIMER[name] for name in running})
    try:
        with get_forward().scoped(**ForwardFlags._DEFAULTS), _expert_recorder_aside(runner):
            yield
    finally:
        timer.update(running)
        forward_context.set_forward_context(context)


@contextmanager
def _expert_recorder_aside(runner: Any) -> Iterator[None]:
    """Let passes in a pause count experts but not rebalance them: the paused pass would go on with moved experts."""
    recorder = vars(get_global_expert_distribution_recorder())
    held, manager = dict(recorder), getattr(runner, "eplb_manager", None)
    # SGLang's recorder can be in only one pass, and one layer of the pass, at a time.
    recorder.update({name: Withable() for name, value in held.items() if isinstance(value, Withable)})
    runner.eplb_manager = None
    try:
        yield
    finally:
        recorder.update(held)
        runner.eplb_manager = manager


@contextmanager
def restored_flags() -> Iterator[None]:
    """Restore SGLang's flags after a pass. A pass with layer normalization divided among ranks clears its flag only at
    the end of its last layer, which an abandoned pass does not reach."""
    flags = get_forward()
    with flags.scoped(sp_active=flags.sp_active):
        yield


class PassState(NamedTuple):
    """The state of a paused pass that cannot be set up again."""

    fields: dict[str, Any]
    """Fields of SET_IN_PASS that the pass has set, with their values."""
    rows: int
    """Number of tokens that the ranks divide among themselves for layer normalization."""
    counts: list[tuple[Any, dict[str, Any]]]
    """SGLang's counters of chosen experts, each with a copy of its tables and lists. SGLang rebalances experts by them
    (--enable-eplb) and records them (--expert-distribution-recorder-mode), one pass at a time."""
    captured: list[tuple[torch.Tensor, torch.Tensor]]
    """Buffers, with copies, of the choices of each token that SGLang returns to clients: experts
    (--enable-return-routed-experts), and the keys that an indexer selects (--enable-return-indexer-topk)."""
    states: Any
    """Metadata of linear attention, and the slots of its batch's states: SGLang translates the slots in place."""
    slots: Any


def save_state(batch: Any) -> PassState:
    """Return the state of `batch` that is lost when another batch runs in its pause. Call it in the pass of `batch`."""
    metadata, linear = _metadata(), _linear()
    fields = {name: value for name in SET_IN_PASS if (value := getattr(metadata, name, None)) is not None}
    capturers: tuple[Any, ...] = (get_global_experts_capturer(), get_global_indexer_capturer())
    captured = [(c.device_cache.buffer, c.device_cache.buffer.clone()) for c in capturers if c is not None]
    kept = fields, layernorm_sp.sp_num_tokens(), _copy_counts(), captured
    if linear is None:
        return PassState(*kept, None, None)
    return PassState(*kept, linear.forward_metadata, batch.mamba_track_indices)


def _copy_counts() -> list[tuple[Any, dict[str, Any]]]:
    recorder: Any = get_global_expert_distribution_recorder()
    if not recorder.recording or not recorder._record_current_pass:
        return []
    return [(g, dict(_copies(g))) for g in recorder._single_pass_gatherers.values()]


def _copies(gatherer: Any) -> Iterator[tuple[str, Any]]:
    for name, value in vars(gatherer).items():
        if isinstance(value, torch.Tensor):
            yield name, value.clone()
        elif isinstance(value, dict | list):
            yield name, value.copy()


def _metadata() -> Any:
    # The pass keeps the backend that it started with: adaptive speculative decoding can give the runner another.
    backend: Any = forward_context.get_attn_backend()
    return getattr(getattr(backend, "prefill_backend", backend), "forward_metadata", None)


def _linear() -> Any:
    return getattr(forward_context.get_attn_backend(), "linear_attn_backend", None)


def put_back(runner: Any, batch: Any, before: PassState) -> None:
    """Restore for `batch`, which goes on, the state that another batch has set up for itself. `before`: result of
    ``save_state``."""
    layernorm_sp.set_sp_num_tokens(before.rows)
    for gatherer, values in before.counts:
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                # A captured graph counts in this tensor, so it must stay the same object.
                getattr(gatherer, name).copy_(value)
            else:
                setattr(gatherer, name, value)
    for buffer, copied in before.captured:
        buffer.copy_(copied)
    if batch.global_num_tokens_cpu is not None:
        # Lengths of the buffers that data-parallel ranks gather.
        dp_attention.set_dp_buffer_len_from_batch(batch)
        dp_attention.set_is_extend_in_batch(batch.is_extend_in_batch)
    if runner.lora_manager is not None:
        # The adapter of each row.
        runner.lora_manager.prepare_lora_batch(batch)
    if batch.forward_mode.is_idle():
        return
    # Attention metadata: each backend has one object, or one set of buffers.
    backend = forward_context.get_attn_backend()
    backend.init_forward_metadata(batch)
    # A batch can run as two parts, each with its own backend.
    parts = zip(backend.children, batch.tbo_children, strict=True) if batch.tbo_children else ()
    for of, its in ((backend, batch), *parts):
        if its.num_prefix_chunks is not None and hasattr(of, "init_mha_chunk_metadata"):
            # In its first layer, latent attention planned how to read the prefix.
            of.init_mha_chunk_metadata(its)
    for name, value in before.fields.items():
        setattr(_metadata(), name, value)
    if before.states is not None:
        _linear().forward_metadata, batch.mamba_track_indices = before.states, before.slots


def wait_for_draft(worker: Any) -> None:
    """Make SGLang reuse KV memory after a prefill pass only when the draft of that pass has been computed, too. In a
    pause, a decode step with a draft of several layers sets a flag that would release the memory earlier."""
    draft: Any = getattr(worker, "draft_worker", None)
    if hasattr(draft, "last_draft_extend_staged"):
        draft.last_draft_extend_staged = False
