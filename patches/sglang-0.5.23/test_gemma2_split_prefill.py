"""A split prefill of Gemma 2 scales its embeddings as the unsplit one does."""

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.models.gemma2 import Gemma2ForCausalLM, Gemma2Model

HIDDEN_SIZE = 3584
"""Gemma 2 9B: its square root is rounded to 59.875 in float16, to 59.75 in bfloat16."""


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_scale(dtype: torch.dtype) -> None:
    embedded = torch.linspace(-1, 1, 64).to(dtype).reshape(2, 32)
    layers = SimpleNamespace(
        embed_tokens=lambda ids: embedded.clone(), layers=[], norm=lambda hidden, residual: (hidden, residual),
        config=SimpleNamespace(hidden_size=HIDDEN_SIZE, num_hidden_layers=0),
    )  # fmt: skip
    model = SimpleNamespace(model=layers, logits_processor=lambda ids, hidden, head, batch: hidden)
    ids = torch.zeros(2, dtype=torch.long)
    batch = SimpleNamespace(hidden_states=None, residual=None)
    split = Gemma2ForCausalLM.forward_split_prefill(model, ids, ids, batch, (0, 0))
    assert torch.equal(split, Gemma2Model.forward(layers, ids, ids, batch))
