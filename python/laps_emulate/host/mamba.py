"""State space models (Mamba 2) in PyTorch, with the names and shapes of SGLang's Triton kernels."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch.nn import functional

from laps_emulate.host.linear_drafts import after_parents, parents_of


def scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int,
    *,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    cu_seqlens: torch.Tensor,
    initial_states: torch.Tensor | None,
    out: torch.Tensor,
    track_end_locs: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Write the output of prompts [1, tokens of all, heads, size] into `out`. Return states [.., heads, size, state
    size]: before each chunk of all tokens, after each prompt, and after the first `track_end_locs` tokens."""
    x, B, C, ends = x[0].float(), B[0].float(), C[0].float(), cu_seqlens.tolist()
    heads = x.shape[1]
    B, C = (part.repeat_interleave(heads // part.shape[1], 1) for part in (B, C))
    dt = functional.softplus(dt[0].float() + dt_bias.float())
    tracked = [] if track_end_locs is None else track_end_locs.tolist()
    marks = {*range(0, len(x), chunk_size), *tracked}
    nothing = x.new_zeros(heads, x.shape[2], B.shape[2])
    at, after = dict.fromkeys(marks, nothing), []
    for i, (begin, end) in enumerate(pairwise(ends)):
        state = nothing if initial_states is None else initial_states[i].float()
        cuts = sorted({begin, end, *(m for m in marks if begin < m < end)})
        for first, last in pairwise(cuts):
            part = slice(first, last)
            said, state = _segment(x[part], dt[part], A.float(), B[part], C[part], state)
            out[0, part] = (said + D.float().unsqueeze(-1) * x[part]).to(out.dtype)
            if last in at:
                at[last] = state
        after.append(state)
    before = torch.stack([at[m] for m in range(0, len(x), chunk_size)])
    return before.unsqueeze(0), torch.stack(after), torch.stack([at[m] for m in tracked]) if tracked else None


def _segment(
    x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output of the tokens `x` [n, heads, size], and the state after these tokens."""
    decay = (dt * A).cumsum(0)
    later = torch.ones(len(x), len(x), dtype=torch.bool).triu(1).unsqueeze(-1)
    kept = (decay.unsqueeze(1) - decay.unsqueeze(0)).masked_fill(later, float("-inf")).exp()
    weights = torch.einsum("ihn,jhn->ijh", C, B) * kept * dt
    said = torch.einsum("ijh,jhp->ihp", weights, x)
    said += torch.einsum("ihn,hpn->ihp", C * decay.exp().unsqueeze(-1), state)
    left = ((decay[-1] - decay).exp() * dt).unsqueeze(-1) * B
    return said, decay[-1].exp().view(-1, 1, 1) * state + torch.einsum("jhn,jhp->hpn", left, x)


def update(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    *,
    dt_bias: torch.Tensor,
    state_batch_indices: torch.Tensor,
    out: torch.Tensor,
    disable_state_update: bool = False,
    intermediate_states_buffer: torch.Tensor | None = None,
    intermediate_state_indices: torch.Tensor | None = None,
    retrieve_parent_token: torch.Tensor | None = None,
    **_: Any,
) -> None:
    """Write the output of the next token of each stream [streams, heads, size] into `out`, and update the states. Or of
    the tokens of its draft [streams, tokens, heads, size], each after its parent; the state after each token goes to
    the buffer [rows, tokens, heads, size, state size]."""
    slots = state_batch_indices.long()
    if x.dim() == 3:
        x, dt, B, C, out = (part.unsqueeze(1) for part in (x, dt, B, C, out))
    streams, tokens, heads = x.shape[:3]
    B, C = (part.float().repeat_interleave(heads // part.shape[2], 2).unsqueeze(-2) for part in (B, C))
    dt = functional.softplus(dt.float() + dt_bias.float()).unsqueeze(-1)
    parents = parents_of(streams, tokens, None, None) if retrieve_parent_token is None else retrieve_parent_token
    left = [state[slots].float()]
    for t in range(tokens):
        now = (dt[:, t] * A).exp() * after_parents(left, parents, t) + dt[:, t] * B[:, t] * x[:, t].float().unsqueeze(
            -1
        )
        out[:, t] = ((now * C[:, t]).sum(-1) + D * x[:, t]).to(out.dtype)
        left.append(now)
        if intermediate_states_buffer is not None and intermediate_state_indices is not None:
            intermediate_states_buffer[intermediate_state_indices.long(), t] = now.to(intermediate_states_buffer.dtype)
    if not disable_state_update:
        state[slots] = left[-1].to(state.dtype)
