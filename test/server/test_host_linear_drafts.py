"""Drafts of models with linear attention without a GPU: each token's state is the same as in normal decoding."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

HEADS, KEY, VALUE, WIDTH = 2, 4, 3, 3
SIZE = HEADS * (2 * KEY + VALUE)
TREE = torch.tensor([[1, -1, 3, -1]]), torch.tensor([[-1, 2, -1, -1]])
"""First children and next siblings of a tree: 0 has the children 1 and 2, and 2 has 3."""


def test_parents_are_computed_for_trees_and_chains() -> None:
    from laps_emulate.host import linear_drafts as drafts

    assert drafts.parents_of(1, 4, *TREE).tolist() == [[-1, 0, 0, 2]]
    assert drafts.parents_of(2, 3, None, None).tolist() == [[-1, 0, 1]] * 2


def test_verification_equals_sequential_decoding() -> None:
    """Checks a tree whose stream has slot 2; the states of its tokens go to row 1."""
    from laps_emulate.host import linear_attention as alone
    from laps_emulate.host import linear_drafts as drafts

    torch.manual_seed(1)
    x, weight = torch.randn(1, SIZE, 4), torch.randn(SIZE, WIDTH)
    a, b, decay, bias = torch.randn(4, HEADS), torch.randn(4, HEADS), torch.randn(HEADS), torch.randn(HEADS)
    conv, states = torch.randn(3, SIZE, WIDTH - 1), torch.randn(3, HEADS, VALUE, KEY)
    before = conv.clone(), states.clone()
    windows, left = torch.zeros(2, 4, SIZE, WIDTH - 1), torch.zeros(2, 4, HEADS, VALUE, KEY)
    slot, row, parents = torch.tensor([2]), torch.tensor([1]), torch.empty(1, 4).long()
    seen = drafts.convolve(
        *(x, conv, weight, None, "silu"),
        conv_state_indices=slot,
        intermediate_conv_window=windows,
        intermediate_state_indices=row,
        retrieve_next_token=TREE[0],
        retrieve_next_sibling=TREE[1],
        retrieve_parent_token=parents,
    )
    q, k, v = seen[0].T.split((HEADS * KEY, HEADS * KEY, HEADS * VALUE), -1)
    q, k, v = (part.reshape(1, 4, HEADS, -1) for part in (q, k, v))
    said = drafts.verify(
        A_log=decay, dt_bias=bias, q=q, k=k, v=v, a=a, b=b,
        initial_state_source=states, initial_state_indices=slot,
        intermediate_states_buffer=left, intermediate_state_indices=row,
        cache_steps=4, retrieve_parent_token=parents,
    )  # fmt: skip
    assert torch.equal(conv, before[0])
    assert torch.equal(states, before[1])
    for path in ((0, 1), (0, 2, 3)):
        own, own_states = conv.clone(), states.clone()
        for t in path:
            token = drafts.convolve(x[..., t], own, weight, None, "silu", conv_state_indices=slot)
            out = torch.empty(1, 1, HEADS, VALUE)
            alone.decode(
                mixed_qkv=token, a=a[t : t + 1], b=b[t : t + 1], A_log=decay, dt_bias=bias,
                initial_state=own_states, out=out, ssm_state_indices=slot,
            )  # fmt: skip
            assert torch.allclose(token[0], seen[0, :, t])
            assert torch.allclose(out[0, 0], said[0, t], atol=1e-6)
            assert torch.allclose(windows[1, t], own[2])
            assert torch.allclose(left[1, t], own_states[2], atol=1e-6)
    assert not windows[0].any()


@pytest.mark.parametrize("activation", [None, "silu"])
def test_convolution_of_two_chunks_and_a_token_equals_that_of_whole_prompt(activation: str | None) -> None:
    from laps_emulate.host import linear_attention as alone
    from laps_emulate.host import linear_drafts as drafts

    torch.manual_seed(2)
    x, weight, states = torch.randn(SIZE, 9), torch.randn(SIZE, WIDTH), torch.randn(3, SIZE, WIDTH - 1)
    found = torch.nn.functional.conv1d(x.unsqueeze(0), weight.unsqueeze(1), padding=WIDTH - 1, groups=SIZE)[0, :, :9]
    for tokens, goes_on in ((x[:, :6], False), (x[:, 6:8], True)):
        out = alone.convolve(
            *(tokens, weight, None),
            conv_states=states,
            cache_indices=torch.tensor([1]),
            has_initial_state=torch.tensor([goes_on]),
            query_start_loc=torch.tensor([0, tokens.shape[1]]),
            activation=activation,
        )
        assert torch.allclose(out, alone.activate(found[:, 6 * goes_on :][:, : tokens.shape[1]], activation), atol=1e-6)
    last = drafts.convolve(x[None, :, 8], states, weight, None, activation, conv_state_indices=torch.tensor([1]))
    assert torch.allclose(last[0], alone.activate(found[:, 8], activation), atol=1e-6)


def test_accept_keeps_states_after_last_correct_token() -> None:
    """Checks three streams: the second has no right token; the third also keeps a state for the prefix cache."""
    from laps_emulate.host import linear_drafts as drafts

    left = torch.arange(1.0, 13.0).view(1, 3, 4, 1, 1)
    pools = SimpleNamespace(
        temporal=torch.zeros(1, 6, 1, 1), intermediate_ssm=left,
        conv=[torch.zeros(1, 6, 1, 1)], intermediate_conv_window=[left + 20],
    )  # fmt: skip
    slots, last = torch.tensor([1, 2, 3]), torch.tensor([0, -1, 3])
    drafts.accept(pools, slots, last, torch.tensor([4, 4, 5]), torch.tensor([-1, -1, 1]))
    assert pools.temporal.flatten().tolist() == [0, 1, 0, 12, 0, 10]
    assert pools.conv[0].flatten().tolist() == [0, 21, 0, 32, 0, 30]
