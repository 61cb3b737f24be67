"""Decoder layers of an SGLang model, and the operators in these layers between which a forward pass can pause.

Layers are found by their classes, without a table of models. A new model needs a change here only if its projection
after attention has a name that is not in ``OUTPUT``, or if the model is refused (``NoLayers``).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from laps_core.slicing import Operator
from sglang.srt.layers.attention.vision import VisionAttention
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.radix_linear_attention import RadixLinearAttention
from torch.nn import Module, ModuleList

OUTPUT = ("o_proj", "out_proj", "dense", "c_proj", "wo")
"""Names of the projection after attention in SGLang's models."""
LINK = "_laps_attention"
"""Attribute that links a layer's attention module to its ``RadixAttention`` (see ``_link_attention``)."""


class Point(NamedTuple):
    """Module before which a pass can pause, and the operator from there to the next point."""

    module: Module
    operator: Operator


class NoLayers(Exception):
    """Error with the reason, in one line, why a model has no layers to pause between."""


def decoder_layers(model: Module) -> list[Module]:
    """Return the layers of the model's decoder: the smallest module list that holds all of the model's attention.

    Raises NoLayers.
    """
    _link_attention(model)
    name, cores = type(model).__name__, _cores(model)
    if not cores:
        raise NoLayers(f"{name} has no attention layers")
    # A module comes before the modules in it, so the last list is the smallest.
    lists = [m for m in model.modules() if isinstance(m, ModuleList) and set(cores) <= set(_cores(m))]
    if not lists:
        raise NoLayers(f"the attention of {name} is not in one list of layers")
    layers = list(lists[-1])
    if len(layers) < 2:
        raise NoLayers(f"{name} has one layer")
    return layers


def encoder_points(model: Module) -> list[Point]:
    """Return the layers of encoders of pictures, video and sound, which run before the decoder, except of encoders with
    their own attention class. Costs are per row and without attention, whose windows are known only on the device."""

    def encodes(layer: Module) -> bool:
        return any(isinstance(m, VisionAttention) for m in layer.modules())

    lists = [m for m in model.modules() if isinstance(m, ModuleList) and len(m) > 1 and all(map(encodes, m))]
    return [Point(layer, Operator(2.0 * _active(layer))) for found in lists for layer in found]


def points(layer: Module, *, blocks: bool) -> list[Point]:
    """Return the points of this layer where a pass can pause, in execution order: before the layer; before attention
    and before the projection after attention, if attention is not latent (only queries, keys and values are held
    there); before each MLP or block of experts. A pass never pauses inside an MLP, where the widest activations are
    held; with `blocks`, a dense MLP runs in blocks of rows instead. A layer that keeps state between its halves has
    only the first point."""
    width = max(map(_width, _cores(layer)), default=0.0)
    if _between_halves(layer):
        return [Point(layer, Operator(2.0 * _active(layer), 4.0 * width))]
    children = [m for child in layer.children() for m in (child if isinstance(child, ModuleList) else (child,))]
    mixers = [m for m in children if _cores(m)]
    mlps = [m for m in children if m not in mixers and len(list(m.children())) > 0 and _active(m) > 0.0]
    found, rest = [], _active(layer) - sum(map(_active, mlps))
    core, output = _plain(mixers)
    if core is None or output is None:
        found.append(Point(layer, Operator(2.0 * rest, 4.0 * width)))
    else:
        after = _active(output)
        found.append(Point(layer, Operator(2.0 * (rest - after))))
        found.append(Point(core, Operator(0.0, 4.0 * width)))
        found.append(Point(output, Operator(2.0 * after)))
    found += [Point(m, Operator(2.0 * _active(m), divisible=blocks and _dense(m))) for m in mlps]
    return found


def _between_halves(layer: Module) -> bool:
    """Return True if the layer keeps coefficients of its residual between attention and MLP (hyper-connections)."""
    boundary: Any = getattr(layer, "ffn_boundary", None)
    return boundary is not None and not boundary.declaration.update.outlives_layer


def _link_attention(model: Module) -> None:
    """Link each layer to its attention in SGLang's transformers backend, which keeps the attention of all layers in a
    dictionary beside the model. The link is no child, so names of weights stay the same."""
    beside: Any = getattr(model, "attention_instances", {})
    found = [m for m in model.modules() if type(m).__name__.endswith("Attention") and _index(m) in beside]
    # Encoders of pictures count their layers, too; with these, it is not known which attention is whose.
    if len({_index(m) for m in found}) == len(found):
        for module in found:
            vars(module)[LINK] = beside[_index(module)]


def _index(module: Module) -> int | None:
    index = getattr(module, "layer_idx", None)
    return index if isinstance(index, int) else None


def _cores(module: Module) -> list[Module]:
    found = (vars(m).get(LINK, m) for m in module.modules())
    return [m for m in found if isinstance(m, RadixAttention | RadixLinearAttention)]


def _plain(mixers: list[Module]) -> tuple[Module | None, Module | None]:
    """Return the attention and the output projection if they are children of the only mixer; None for a missing one."""
    if len(mixers) != 1 or len(_cores(mixers[0])) != 1:
        return None, None
    children = dict(mixers[0].named_children())
    core = next((m for m in children.values() if isinstance(m, RadixAttention)), None)
    return core, next((children[n] for n in OUTPUT if n in children), None)


def _width(core: Module) -> float:
    """Return heads times mean head size of one attention on this rank; 0 for linear attention."""
    if not isinstance(core, RadixAttention):
        return 0.0
    heads: Any = core.tp_q_head_num
    return float(heads * (core.qk_head_dim + core.v_head_dim) / 2)


def _active(module: Module) -> float:
    """Return the number of parameters used by a token; of experts, only the share that the token is routed to."""
    return sum(_share(m) * p.numel() for m in module.modules() for p in m.parameters(recurse=False))


def _share(module: Module) -> float:
    routed, experts = getattr(module, "top_k", None), getattr(module, "num_experts", None)
    if isinstance(routed, int) and isinstance(experts, int) and 0 < routed < experts:
        return routed / experts
    return 1.0


def _dense(module: Module) -> bool:
    """Return True for a dense MLP. Each of its output rows depends only on the same input row, so rows can run in
    blocks."""
    names = dict(module.named_children())
    return {"gate_up_proj", "down_proj"} <= set(names) and not hasattr(module, "experts")
