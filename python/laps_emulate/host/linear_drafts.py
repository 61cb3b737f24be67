"""Verification of drafts by linear attention in PyTorch, with the names and shapes of SGLang's Triton kernels. The
state after each token of a draft is kept until it is known which tokens are accepted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

from laps_emulate.host.linear_attention import activate, convolve_next, gates


def convolve(
    x: torch.Tensor,
    state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    *,
    conv_state_indices: torch.Tensor,
    intermediate_conv_window: torch.Tensor | None = None,
    intermediate_state_indices: torch.Tensor | None = None,
    retrieve_next_token: torch.Tensor | None = None,
    retrieve_next_sibling: torch.Tensor | None = None,
    retrieve_parent_token: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the convolution of draft tokens [streams, size, tokens], each after its parent, and store the window after
    each token [rows, tokens, size, width - 1]. Or convolve the next token of each stream [streams, size]."""
    if intermediate_conv_window is None or intermediate_state_indices is None:
        return convolve_next(x, state, weight, bias, activation, conv_state_indices=conv_state_indices)
    parents = parents_of(len(x), x.shape[-1], retrieve_next_token, retrieve_next_sibling)
    if retrieve_parent_token is not None:
        retrieve_parent_token.copy_(parents)
    out, left = torch.empty_like(x), [state[conv_state_indices.long()].to(x.dtype)]
    for t in range(x.shape[-1]):
        seen = torch.cat((after_parents(left, parents, t), x[..., t : t + 1]), -1)
        found = (seen * weight).sum(-1)
        out[..., t] = activate(found if bias is None else found + bias, activation)
        left.append(seen[..., 1:])
        intermediate_conv_window[intermediate_state_indices.long(), t] = left[-1].to(intermediate_conv_window.dtype)
    return out


def parents_of(streams: int, tokens: int, child: torch.Tensor | None, sibling: torch.Tensor | None) -> torch.Tensor:
    """Return the parent of each token of the trees [streams, tokens], -1 for the first. `child`, `sibling` [streams,
    tokens]: first child and next sibling of a token, -1 for none; without both, each draft is a chain."""
    if child is None or sibling is None:
        return torch.arange(-1, tokens - 1).expand(streams, tokens)
    found = torch.full((streams, tokens), -1)
    for stream in range(streams):
        for t in range(tokens):
            for parent, other in ((t, child[stream, t]), (found[stream, t], sibling[stream, t])):
                if other >= 0:
                    found[stream, other] = parent
    return found


def after_parents(left: Sequence[torch.Tensor], parents: torch.Tensor, t: int) -> torch.Tensor:
    """Return the states after the parents of token `t` [streams, ..]. `left`: the states before the first token, and
    after each token so far."""
    streams = len(left[0])
    return torch.stack(tuple(left), 1)[torch.arange(streams), parents[:streams, t].long() + 1]


def verify(
    *,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    initial_state_source: torch.Tensor,
    initial_state_indices: torch.Tensor,
    intermediate_states_buffer: torch.Tensor,
    intermediate_state_indices: torch.Tensor,
    cache_steps: int,
    retrieve_parent_token: torch.Tensor | None,
    **_: Any,
) -> torch.Tensor:
    """Return the output of draft tokens [1, tokens of all, heads, size]. Store the state after each token in the buffer
    [rows, tokens, heads, value size, key size]; keep the streams' states [slots, heads, value size, key size]."""
    n, heads = cache_steps, v.shape[2]
    streams = q.shape[1] // n
    # Padded rows of a batch have no stream.
    slots, rows = initial_state_indices[:streams].long(), intermediate_state_indices[:streams].long()
    q, k = (x.repeat_interleave(heads // x.shape[2], 2) for x in (q, k))
    q, k, values = (x.reshape(streams, n, heads, -1) for x in (q, k, v))
    decays, rates = (x.view(streams, n, heads) for x in gates(A_log, a, b, dt_bias))
    parents = parents_of(streams, n, None, None) if retrieve_parent_token is None else retrieve_parent_token
    out, left = torch.empty_like(values), [initial_state_source[slots].transpose(-1, -2).float()]
    for t in range(n):
        now = slice(t, t + 1)
        out[:, now], state = torch_recurrent_gated_delta_rule(
            *(x[:, now] for x in (q, k, values)),
            g=decays[:, now],
            beta=rates[:, now],
            initial_state=after_parents(left, parents, t),
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        left.append(state)
        intermediate_states_buffer[rows, t] = state.transpose(-1, -2).to(intermediate_states_buffer.dtype)
    return out.view(v.shape)


def accept(
    pools: Any,
    slots: torch.Tensor,
    last: torch.Tensor,
    kept_slots: torch.Tensor | None,
    kept: torch.Tensor | None,
    src_indices_raw: torch.Tensor | None = None,
) -> None:
    """Set the states of streams to those after the `last` accepted token. Copy the states after the tokens `kept` to
    other slots, for the prefix cache. Token -1: none."""
    rows = torch.arange(len(last)) if src_indices_raw is None else src_indices_raw
    pairs = [(pools.temporal, pools.intermediate_ssm), *zip(pools.conv, pools.intermediate_conv_window, strict=True)]
    for end, begin in pairs:
        for places, tokens in ((slots, last), (kept_slots, kept)):
            if places is None or tokens is None:
                continue
            found = (tokens >= 0).nonzero().flatten()
            end[:, places[found].long()] = begin[:, rows[found].long(), tokens[found].long()].to(end.dtype)
