"""A prefill of Gemma 3 that is split between layers gives what the unsplit one gives."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.models.gemma3_causal import Gemma3ForCausalLM

LAYERS = 4


def layer(hidden_states: torch.Tensor, residual: torch.Tensor | None = None, **_: Any) -> tuple[torch.Tensor, ...]:
    residual = hidden_states if residual is None else hidden_states + residual
    return residual * 0.5 + 1, residual


def norm(hidden_states: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
    return hidden_states if residual is None else (hidden_states + residual, residual)


@pytest.mark.parametrize("first", range(1, LAYERS + 1))
def test_splits(first: int) -> None:
    embedded = torch.arange(6.0).reshape(3, 2)
    model = SimpleNamespace(
        model=SimpleNamespace(
            embed_tokens=lambda ids: embedded.clone(), rotary_emb=lambda h, p: None, rotary_emb_local=lambda h, p: None,
            layers=[layer] * LAYERS, norm=norm, config=SimpleNamespace(num_hidden_layers=LAYERS),
        ),
        logits_processor=lambda ids, hidden, head, batch: hidden,
    )  # fmt: skip
    residual, hidden = None, embedded
    for _ in range(LAYERS):
        hidden, residual = layer(hidden, residual)
    # What an earlier pass has left in the batch does not count.
    batch = SimpleNamespace(hidden_states=None, residual=torch.full((3, 2), 9.0), model_specific_states=None)
    ids, positions, result = torch.zeros(3, dtype=torch.long), torch.arange(3), None
    for split in ((0, first), (first, LAYERS)):
        if split[0] < split[1]:
            result = Gemma3ForCausalLM.forward_split_prefill(model, ids, positions, batch, split)
    assert result is not None
    assert torch.equal(result, norm(hidden, residual)[0])
