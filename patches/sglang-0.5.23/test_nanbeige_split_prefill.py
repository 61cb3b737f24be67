"""A prefill of Nanbeige that is split between layers gives what the unsplit one gives, whatever its loops."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from sglang.srt.models import nanbeige
from sglang.srt.models.nanbeige import NanbeigeForCausalLM, NanbeigeModel

LAYERS = 4
EMBEDDED = torch.arange(6.0).reshape(3, 2)


class Layer:
    """Adds to the residual, and gives what depends on the layer, the loop and all that came before."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __call__(
        self, positions: Any, hidden: torch.Tensor, batch: Any, loop_idx: int, capture_output: Any = None
    ) -> torch.Tensor:
        batch.residual = hidden if batch.residual is None else batch.residual + hidden
        return batch.residual * 0.5 + self._number + 10 * loop_idx


def start(batch: Any) -> None:
    batch.residual = None


def fold(hidden: torch.Tensor, batch: Any) -> torch.Tensor:
    return hidden + batch.residual


def final_norm(hidden: torch.Tensor, batch: Any, norm: Any, **_: Any) -> torch.Tensor:
    return norm(fold(hidden, batch))


@pytest.mark.parametrize("skips_norm", [True, False])
@pytest.mark.parametrize("loops", [1, 2, 3])
@pytest.mark.parametrize("first", range(1, LAYERS + 1))
def test_splits(first: int, loops: int, skips_norm: bool) -> None:
    config = SimpleNamespace(num_hidden_layers=LAYERS, num_loops=loops, skip_loop_final_norm=skips_norm)
    layers = SimpleNamespace(
        config=config, layers=[Layer(i) for i in range(LAYERS)], start_layer=0, end_layer=LAYERS,
        embed_tokens=lambda ids: EMBEDDED.clone(), norm=lambda hidden: hidden / 3.0 - 1.0, layers_to_capture=[],
        pp_group=SimpleNamespace(is_first_rank=True, is_last_rank=True),
    )  # fmt: skip
    model = SimpleNamespace(
        config=config, model=layers, lm_head=None, logits_processor=lambda ids, hidden, head, batch: hidden
    )
    ids, positions, result = torch.zeros(3, dtype=torch.long), torch.arange(3), None
    batch = SimpleNamespace(hidden_states=None, residual=torch.full((3, 2), 9.0))
    residuals = SimpleNamespace(start=start, fold=fold, final_norm=final_norm)
    with mock.patch.object(nanbeige, "residual_batch", residuals):
        whole = NanbeigeModel.forward(layers, ids, positions, SimpleNamespace(residual=None))
        for split in ((0, first), (first, LAYERS)):
            if split[0] < split[1]:
                assert result is None
                result = NanbeigeForCausalLM.forward_split_prefill(model, ids, positions, batch, split)
    assert result is not None
    assert torch.equal(result, whole)
