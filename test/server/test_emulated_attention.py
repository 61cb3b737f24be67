"""Attention of any kind on an emulated device: keys and values are stored, but nothing is computed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest


@pytest.mark.parametrize(("size", "value_size"), [(32, 32), (80, 64)], ids=["plain", "latent"])
def test_emulated_attention_stores_kv_without_computing(size: int, value_size: int) -> None:
    import torch
    from laps_emulate.host.attention import HostAttention
    from laps_emulate.install import leave_out_attention
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    def never(*_: Any) -> Any:
        raise AssertionError("no history is read")

    saved: list[Any] = []
    backend: Any = HostAttention.__new__(HostAttention)
    backend.use_sliding_window_kv_pool, backend.swa_out_cache_loc = False, None
    backend.token_to_kv_pool = SimpleNamespace(
        set_kv_buffer=lambda layer, where, k, v: saved.append((k, v)),
        get_key_buffer=lambda _: None,
        get_value_buffer=lambda _: None,
    )
    backend.req_to_token_pool = SimpleNamespace(req_to_token=None)
    backend._attend = never
    leave_out_attention(backend)
    layer = SimpleNamespace(
        qk_head_dim=size, v_head_dim=value_size, tp_q_head_num=4, tp_k_head_num=1, layer_id=0, logit_cap=0.0,
        is_cross_attention=False, attn_type=None, scaling=1.0, sliding_window_size=-1,
    )  # fmt: skip
    names = ("out_cache_loc", "req_pool_indices", "seq_lens", "extend_prefix_lens", "extend_seq_lens", "encoder_lens")
    batch = SimpleNamespace(**dict.fromkeys(names), forward_mode=ForwardMode.EXTEND)
    q, k, v = torch.ones(7, 4 * size), torch.ones(7, 1, size), torch.ones(7, 1, value_size)
    output = backend.forward_extend(q, k, v, layer, batch)
    assert torch.equal(output, torch.zeros(7, 4 * value_size))
    assert len(saved) == 1
    assert saved[0] == (k, v)
