"""Models whose layers hold their attention or their MLPs in an unusual way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sglang_laps.passes import slices
from sglang_laps.passes.layers import NoLayers, decoder_layers, points
from toy_model import Layer, Runner, batch


def move_attention_beside(model: Any) -> None:
    """Keep attention in a dictionary of the model, like SGLang's transformers backend."""
    model.attention_instances = {i: layer.self_attn.attn for i, layer in enumerate(model.layers)}
    for i, layer in enumerate(model.layers):
        del layer.self_attn.attn
        vars(layer.self_attn)["attn"] = model.attention_instances[i]
        layer.self_attn.layer_idx = i


def test_layers_with_attention_beside_them_pause() -> None:
    runner = Runner(3)
    move_attention_beside(runner.model)
    names = [*runner.model.state_dict()]
    whole = runner.forward(batch((40, 7)))
    runner.ran.clear()
    cutter = slices.Slices(runner)

    def pause(_: float) -> bool:
        runner.ran.append("pause")
        return False

    with cutter.cut(0.01, pause):
        torch.testing.assert_close(runner.forward(batch((40, 7))), whole)
    layer = ["attention", "pause", "mlp 40"]
    assert runner.ran == [*layer, "pause", *layer, "pause", *layer]
    assert cutter.layers == 3
    assert [*runner.model.state_dict()] == names, "weights keep their names"


def test_attention_beside_layers_costs_what_attention_in_layers_costs() -> None:
    inside, beside = Runner(2).model, Runner(2).model
    move_attention_beside(beside)
    cost = [sum(p.operator.attention for p in points(decoder_layers(m)[0], blocks=False)) for m in (inside, beside)]
    assert cost[0] == cost[1] > 0.0


def test_model_whose_encoder_counts_its_layers_too_is_refused() -> None:
    model = Runner(3).model
    move_attention_beside(model)
    encoder = Runner(3).model.layers
    for i, layer in enumerate(encoder):
        del layer.self_attn.attn
        layer.self_attn.layer_idx = i
    model.encoder_layers = encoder
    with pytest.raises(NoLayers, match="no attention layers"):
        decoder_layers(model)


def test_each_mlp_of_a_list_in_a_layer_is_a_point() -> None:
    """LongCat has two MLPs, and two attention modules, in lists, which are never called themselves."""
    layer: Any = Layer(0, print)
    other = Layer(1, print)
    mlps = [layer.mlp, other.mlp]
    whole = sum(p.operator.tokens for x in (layer, other) for p in points(x, blocks=False))
    layer.mlps = torch.nn.ModuleList(mlps)
    layer.self_attn = torch.nn.ModuleList([layer.self_attn, other.self_attn])
    layer.norm = torch.nn.ModuleList([layer.norm, other.norm])
    del layer.mlp
    found = points(layer, blocks=False)
    assert [p.module for p in found] == [layer, *mlps]
    assert sum(p.operator.tokens for p in found) == whole
