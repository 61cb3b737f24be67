"""CPU attention that computes a chunk's new tokens only.

SGLang's own CPU attention computes each chunk over the whole prefix. No device does that, and small chunks would look
worse than they are. All compared servers use this plugin, also the stock servers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention as attention


def load() -> None:
    """Replace SGLang's attention; entry point of the group ``sglang.srt.plugins``."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    TorchNativeAttnBackend._run_sdpa_forward_extend = extend


def extend(
    self: Any,
    query: torch.Tensor,
    output: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    places: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    before: torch.Tensor,
    new: torch.Tensor,
    *_: Any,
    scaling: float | None = None,
    enable_gqa: bool = False,
    **__: Any,
) -> torch.Tensor:
    """Compute causal attention of each request's ``new`` tokens to all its ``lengths`` tokens, of which ``before``
    tokens are already computed."""
    at = 0
    for row, total, old, count in zip(rows.tolist(), lengths.tolist(), before.tolist(), new.tolist(), strict=True):
        held = places[row, :total]
        q, k, v = (x.movedim(0, 1)[None] for x in (query[at : at + count], keys[held], values[held]))
        mask = torch.ones(count, total, dtype=torch.bool).tril(old) if old else None
        found = attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=enable_gqa)
        output[at : at + count] = found[0].movedim(1, 0)
        at += count
    return output
