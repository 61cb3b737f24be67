"""State-space layers without a GPU: one pass over many tokens gives the same outputs and states as single tokens."""

from __future__ import annotations

import pytest
import torch

HEADS, SIZE, STATE = 4, 3, 5


@pytest.mark.parametrize("goes_on", [False, True], ids=("new", "goes on"))
def test_prompt_scan_equals_sequential_updates(goes_on: bool) -> None:
    """Checks two prompts of 10 and 7 tokens in chunks of 4, and the state after 13 tokens of the pass."""
    from laps_emulate.host import mamba

    torch.manual_seed(1)
    x, dt = torch.randn(17, HEADS, SIZE), torch.randn(17, HEADS)
    b, c = torch.randn(17, 2, STATE), torch.randn(17, 2, STATE)
    a, d, bias = -torch.rand(HEADS), torch.randn(HEADS), torch.randn(HEADS)
    first = torch.randn(2, HEADS, SIZE, STATE) if goes_on else torch.zeros(2, HEADS, SIZE, STATE)
    out = torch.empty(1, 17, HEADS, SIZE)
    before, after, tracked = mamba.scan(
        *(x[None], dt[None], a, b[None], c[None], 4),
        D=d, dt_bias=bias, cu_seqlens=torch.tensor([0, 10, 17]), initial_states=first if goes_on else None,
        out=out, track_end_locs=torch.tensor([13]),
    )  # fmt: skip
    states = first.clone()
    for t in range(17):
        slot = torch.tensor([int(t >= 10)])
        alone = torch.empty(1, HEADS, SIZE)
        now = slice(t, t + 1)
        mamba.update(
            *(states, x[now], dt[now, :, None].expand(-1, -1, SIZE)),
            a.view(-1, 1, 1).expand(-1, SIZE, STATE), b[now], c[now], d[:, None].expand(-1, SIZE),
            dt_bias=bias[:, None].expand(-1, SIZE), state_batch_indices=slot, out=alone,
        )  # fmt: skip
        assert torch.allclose(out[0, t], alone[0], atol=1e-5)
        if t + 1 in (4, 8, 12, 16):
            assert torch.allclose(before[0, (t + 1) // 4], states[slot[0]], atol=1e-5)
        if t + 1 == 13:
            assert tracked is not None
            assert torch.allclose(tracked[0], states[1], atol=1e-5)
    assert torch.allclose(after, states, atol=1e-5)
