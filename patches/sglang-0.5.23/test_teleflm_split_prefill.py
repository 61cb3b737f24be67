"""A split prefill of TeleFLM scales its embeddings as the unsplit one does."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from sglang.srt.models.llama import LlamaForCausalLM, LlamaModel
from sglang.srt.models.teleflm import TeleFLMForCausalLM, TeleFLMModel

EMBEDDED = torch.arange(6.0).reshape(3, 2)


def embed(ids: torch.Tensor) -> torch.Tensor:
    return EMBEDDED.clone()


def embed_unless_given(ids: torch.Tensor, given: torch.Tensor | None) -> torch.Tensor:
    """Return the input to the first layer, as Llama's ``forward`` and ``forward_split_prefill`` choose it."""
    return embed(ids) if given is None else given


@pytest.mark.parametrize("given", [None, EMBEDDED + 1])
@pytest.mark.parametrize("use_mup", [True, False])
def test_input_of_the_first_layer(use_mup: bool, given: torch.Tensor | None) -> None:
    layers = object.__new__(TeleFLMModel)
    rank = SimpleNamespace(is_first_rank=True)
    vars(layers).update(use_mup=use_mup, input_mult=3.0, pp_group=rank, embed_tokens=embed)
    model = object.__new__(TeleFLMForCausalLM)
    vars(model).update(use_mup=use_mup, model=layers)
    ids = torch.zeros(3, dtype=torch.long)

    def forward(self: Any, **given: Any) -> torch.Tensor:
        return embed_unless_given(given["input_ids"], given["input_embeds"])

    def split(self: Any, ids: Any, positions: Any, batch: Any, interval: Any, embeds: Any = None) -> torch.Tensor:
        return embed_unless_given(ids, embeds)

    with mock.patch.object(LlamaModel, "forward", forward):
        whole = TeleFLMModel.forward(layers, ids, ids, None, given)
    with mock.patch.object(LlamaForCausalLM, "forward_split_prefill", split):
        assert torch.equal(model.forward_split_prefill(ids, ids, None, (0, 1), given), whole)
