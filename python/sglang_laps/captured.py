"""Choices of each token that SGLang returns to clients: experts (--enable-return-routed-experts), and the keys that an
indexer selects (--enable-return-indexer-topk). Each kind has one buffer, for the running forward pass."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.state_capturer.indexer_topk import get_global_indexer_capturer
from sglang.srt.state_capturer.routed_experts import get_global_experts_capturer

Captured = list[tuple[Any, torch.Tensor]]
"""Buffers of SGLang, and copies of their contents."""


def copy_captured() -> Captured:
    """Return a copy of what was captured of the pass that is about to be paused."""
    capturers: tuple[Any, ...] = (get_global_experts_capturer(), get_global_indexer_capturer())
    buffers = [c.device_cache.buffer for c in capturers if c is not None]
    return [(buffer, buffer.clone()) for buffer in buffers]


def put_back(captured: Captured) -> None:
    """Restore `captured` in place: a graph of another pass has captured into the same buffers."""
    for buffer, values in captured:
        buffer.copy_(values)
