"""LoRA adapters that fit the model. SGLang loads any adapter, such as one that was trained for another model; the first
request that uses it would end the scheduler."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch

from sglang_laps import seams

_MANAGER = "lora.lora_manager.LoRAManager"
LOADS = (f"{_MANAGER}._load_lora_adapter", f"{_MANAGER}._load_lora_adapter_from_tensors")
BUFFERS = (
    *("A_buffer", "B_buffer", "embedding_A_buffer", "embedding_B_buffer"),
    *("lm_head_A_buffer", "lm_head_B_buffer", "new_embeddings_buffer"),
)
"""Tables of a memory pool: the weights of the adapters that are in use."""
WEIGHTS = ("embedding_layers", "added_tokens_embeddings")
"""Tables of an adapter beside those of its layers."""


def hook() -> None:
    """Have the scheduler refuse adapters that do not fit."""
    for method in LOADS:
        seams.hook(method, load, "AROUND")
    seams.hook(f"{_MANAGER}.init_memory_pool", require_fitting, "AFTER")


def load(original: Callable[..., Any], manager: Any, ref: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap the methods that load an adapter: answer with the reason if the adapter does not fit. Leave nothing of an
    adapter that was not loaded."""
    result = original(manager, ref, *args, **kwargs)
    wrong = why_not(manager, ref.lora_id) if result.success and hasattr(manager, "memory_pool") else None
    if result.success and wrong is None:
        return result
    if wrong is not None:
        manager.unload_lora_adapter(ref)
        result = manager.create_lora_update_result(success=False, error_message=wrong)
    manager.configs.pop(ref.lora_id, None)
    return result


def require_fitting(result: Any, manager: Any) -> Any:
    """Raise RuntimeError, which ends the launch, if an adapter of ``--lora-paths`` does not fit. Call it once the
    memory pool is made."""
    for lora_id, ref in manager.lora_refs.items():
        if wrong := why_not(manager, lora_id):
            raise RuntimeError(f"Failed to load LoRA adapter {ref.lora_name}: {wrong}")
    return result


def why_not(manager: Any, lora_id: str) -> str | None:
    """Return why SGLang cannot put an adapter into its memory pool, or None. Try it with tensors without data."""
    pool, adapter = copy.copy(manager.memory_pool), manager.loras[lora_id]
    for name in BUFFERS:
        setattr(pool, name, _without_data(getattr(pool, name)))
    shapes = SimpleNamespace(
        config=adapter.config,
        scaling=adapter.scaling,
        layers=[SimpleNamespace(weights=_without_data(layer.weights), pinned_weights={}) for layer in adapter.layers],
        pinned_embedding_layers={},
        pinned_added_tokens_embeddings={},
        **{name: _without_data(getattr(adapter, name)) for name in WEIGHTS},
    )
    modules = manager.lora_modules, manager.embed_tokens_module, manager.lm_head_module
    try:
        pool.load_lora_weight_to_buffer(lora_id, 0, shapes, *modules)
    except Exception as e:
        return f"the adapter does not fit this model: {type(e).__name__}: {e}"
    return None


def _without_data(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.empty_like(value, device="meta")
    if isinstance(value, Mapping):
        return {name: _without_data(v) for name, v in value.items()}
    return [_without_data(v) for v in value]
