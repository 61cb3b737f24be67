"""Linear attention by the gated delta rule in PyTorch: the recurrences of the transformers library, with the names and
shapes of SGLang's Triton kernels."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.nn import functional
from transformers.models.qwen3_next.modeling_qwen3_next import (
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

CHUNK = 64
"""Number of tokens after which SGLang's prefix cache can keep a state."""


def gates(
    decay: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return decays (logarithms) and learning rates of tokens [1, tokens, heads], from `a` and `b` [tokens, heads]."""
    rates = functional.softplus(a.float() + bias.float())
    return (-decay.float().exp() * rates).unsqueeze(0), b.float().sigmoid().unsqueeze(0)


def convolve(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    conv_states: torch.Tensor,
    cache_indices: torch.Tensor,
    has_initial_state: torch.Tensor,
    seq_lens_cpu: Sequence[int] | None = None,
    query_start_loc: torch.Tensor | None = None,
    activation: str | None = "silu",
    **_: Any,
) -> torch.Tensor:
    """Convolve prompts [size, tokens of all], each after its state [slots, size, width - 1], and update the states.
    Their lengths are `seq_lens_cpu`, or the differences of `query_start_loc`."""
    if seq_lens_cpu is None:
        assert query_start_loc is not None
        seq_lens_cpu = query_start_loc.diff().tolist()
    out, begin, width = torch.empty_like(x), 0, weight.shape[1]
    for tokens, slot, goes_on in zip(seq_lens_cpu, cache_indices.tolist(), has_initial_state.tolist(), strict=True):
        before = conv_states[slot] if goes_on else torch.zeros_like(conv_states[slot])
        row = torch.cat((before.to(x.dtype), x[:, begin : begin + tokens]), 1)
        found = functional.conv1d(row.unsqueeze(0), weight.unsqueeze(1), bias, groups=len(weight))
        out[:, begin : begin + tokens] = activate(found.squeeze(0), activation)
        conv_states[slot] = row[:, row.shape[1] - width + 1 :]
        begin += tokens
    return out


def convolve_next(
    x: torch.Tensor,
    state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None = "silu",
    *,
    conv_state_indices: torch.Tensor,
) -> torch.Tensor:
    """Return the convolution of one token of each stream [streams, size], and update the states."""
    slots = conv_state_indices.long()
    row = torch.cat((state[slots].to(x.dtype), x.unsqueeze(-1)), -1)
    state[slots] = row[..., 1:].to(state.dtype)
    found = (row * weight).sum(-1)
    return activate(found if bias is None else found + bias, activation)


def activate(x: torch.Tensor, activation: str | None) -> torch.Tensor:
    """Return `x` after this activation; None = no activation."""
    return x if activation is None else functional.silu(x)


def prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    initial_state: torch.Tensor,
    initial_state_indices: torch.Tensor,
    cu_seqlens: torch.Tensor,
    **_: Any,
) -> tuple[torch.Tensor, None, torch.Tensor]:
    """Return the output of prompts [1, tokens of all, heads, size], None, and the states before each chunk [1, chunks,
    heads, value size, key size]. Continue and update the states [slots, heads, value size, key size]."""
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
    out, states, ends = torch.empty_like(v), [], cu_seqlens.tolist()
    for i, slot in enumerate(initial_state_indices.tolist()):
        state = initial_state[slot].transpose(-1, -2).unsqueeze(0).float()
        for begin in range(ends[i], ends[i + 1], CHUNK):
            part = slice(begin, min(begin + CHUNK, ends[i + 1]))
            states.append(state.transpose(-1, -2))
            said, state = torch_chunk_gated_delta_rule(
                *(x[:, part] for x in (q, k, v)),
                g=g[:, part],
                beta=beta[:, part],
                initial_state=state,
                output_final_state=True,
                use_qk_l2norm_in_kernel=True,
            )
            out[:, part] = said
        initial_state[slot] = state.squeeze(0).transpose(-1, -2).to(initial_state.dtype)
    return out, None, torch.stack(states, 1)


def decode(
    *,
    mixed_qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    initial_state: torch.Tensor,
    out: torch.Tensor,
    ssm_state_indices: torch.Tensor,
    **_: Any,
) -> None:
    """Write the output of each stream's next token into `out` [streams, 1, heads, size], and update the states."""
    slots, (heads, value, key) = ssm_state_indices.long(), initial_state.shape[1:]
    keys = (mixed_qkv.shape[1] - heads * value) // 2
    q, k, v = mixed_qkv.split((keys, keys, heads * value), -1)
    q, k = (x.reshape(len(x), 1, -1, key).repeat_interleave(heads * key // keys, 2) for x in (q, k))
    decays, rates = gates(A_log, a, b, dt_bias)
    said, state = torch_recurrent_gated_delta_rule(
        *(q, k, v.reshape(len(v), 1, heads, value)),
        g=decays.transpose(0, 1),
        beta=rates.transpose(0, 1),
        initial_state=initial_state[slots].transpose(-1, -2).float(),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    out.copy_(said)
    initial_state[slots] = state.transpose(-1, -2).to(initial_state.dtype)


def keep(
    conv: torch.Tensor,
    states: torch.Tensor,
    sources: torch.Tensor,
    kept: torch.Tensor,
    slots: torch.Tensor,
    *_: Any,
    axis: int = 0,
    **__: Any,
) -> None:
    """Copy the states of streams that are `kept` to other slots, for the prefix cache. `axis`: axis of the slots."""
    rows = kept.nonzero().flatten()
    begin, end = sources[rows].long(), slots[rows].long()
    for pool in (conv, states):
        pool.index_copy_(axis, end, pool.index_select(axis, begin))


keep_in_all_layers = partial(keep, axis=1)
"""``keep`` for pools whose first axis is layers."""


def norm_gated(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    z: torch.Tensor,
    *,
    eps: float,
    activation: str,
    **_: Any,
) -> torch.Tensor:
    """Return the result of ``norm``, which takes the arguments in another order."""
    return norm(x, z, weight, bias, activation, eps=eps)


def norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    *,
    eps: float,
    **_: Any,
) -> torch.Tensor:
    """Return the root-mean-square norm of `x` [rows, size], times the activation of its gate."""
    of = torch.sigmoid if activation == "sigmoid" else functional.silu
    return (functional.rms_norm(x.float(), x.shape[-1:], weight.float(), eps) * of(gate.float())).to(x.dtype)
