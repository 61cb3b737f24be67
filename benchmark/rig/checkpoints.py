"""Small seeded checkpoints of any transformers architecture, generated locally: no model hub is needed."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmark.rig import model

LAYERS = 6
SEED = 7
VERSION = 1
"""Version of the weights. Increase it when the weights change, so that existing checkpoints are made again."""
SIZES: Mapping[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16384,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
"""Default sizes. With two key heads, two TP ranks have one head each."""
EXPERTS: Mapping[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 4096}
DEEPSEEK: Mapping[str, Any] = {
    **EXPERTS,
    # The rotary embedding of DeepSeek's own checkpoints; SGLang's CPU attention supports no other.
    "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1},
    **{"num_key_value_heads": 4, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32},
    **{"n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1},
    **{"n_group": 2, "topk_group": 1, "routed_scaling_factor": 1.5},
}


@dataclass(frozen=True)
class Architecture:
    """One checkpoint: a transformers configuration, and further fields that SGLang reads."""

    family: str
    """Prefix of the transformers classes ending in ``Config`` and ``ForCausalLM``."""
    sizes: Mapping[str, Any]
    """Fields of the configuration that differ from SIZES."""
    written: Mapping[str, Any] = field(default_factory=dict)
    """Fields that only config.json gets, because transformers has them as constants or not at all."""
    config: str = ""
    """Name of the configuration class, if different."""
    nextn: bool = False
    """True if one more layer predicts a further token (``--speculative-algorithm NEXTN``), as in real checkpoints."""
    embedding: float = 1.0
    """Factor of the embeddings, as in ``model.Shape``."""

    @property
    def key(self) -> str:
        """Return ten characters that change with the checkpoint's contents."""
        return model.key([asdict(self), dict(SIZES), VERSION, SEED])


DEEPSEEK3 = Architecture(
    "DeepseekV3",
    {**DEEPSEEK, "q_lora_rank": 64},
    {"moe_layer_freq": 1, "ep_size": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    nextn=True,
)
"""Mixture of experts with latent attention, the kind of model that data-parallel attention is made for."""


def make(folder: Path, name: str, chosen: Architecture) -> Path:
    """Write the checkpoint of an architecture under ``folder`` unless it exists; return its path.

    Weights are float32, seeded, saved as safetensors, with tokenizer.
    """

    def write(tmp: Path) -> None:
        _save_weights(tmp, chosen)
        model.save_tokenizer(tmp, model.Shape(context=SIZES["max_position_embeddings"]))

    return model.once(folder / f"{name}-{chosen.key}", write)


def random_weights(chosen: Architecture, layers: int) -> Any:
    """Return a transformers model on the CPU, with seeded weights."""
    import torch
    import transformers

    torch.manual_seed(SEED)
    family = getattr(transformers, f"{chosen.family}ForCausalLM")
    make_config = getattr(transformers, chosen.config or f"{chosen.family}Config")
    config = make_config(**{**SIZES, **chosen.sizes, "num_hidden_layers": layers})
    config.architectures = [family.__name__]
    made = family(config).to(torch.float32)
    with torch.no_grad():
        for name, values in made.state_dict().items():
            randomize(name, values)
        made.get_input_embeddings().weight.mul_(chosen.embedding)
    return made


def _save_weights(folder: Path, chosen: Architecture) -> None:
    random_weights(chosen, LAYERS + chosen.nextn).save_pretrained(folder, safe_serialization=True)
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **chosen.written}
    if chosen.nextn:
        _add_nextn(folder / "model.safetensors")
        config = {k: v[:LAYERS] if k.endswith("layer_types") else v for k, v in config.items()}
        config |= {"num_hidden_layers": LAYERS, "num_nextn_predict_layers": 1}
    path.write_text(json.dumps(config, indent=1))


def _add_nextn(path: Path) -> None:
    """Make the last layer predict a further token from a hidden state and its token."""
    import torch
    from safetensors.torch import load_file, save_file

    weights, size, layer = load_file(path), SIZES["hidden_size"], f"model.layers.{LAYERS}"
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        weights[f"{layer}.{norm}.weight"] = 1.0 + 0.1 * torch.randn(size)
    weights[f"{layer}.eh_proj.weight"] = torch.randn(size, 2 * size) / math.sqrt(2 * size)
    weights[f"{layer}.embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    weights[f"{layer}.shared_head.head.weight"] = weights["lm_head.weight"].clone()
    save_file(weights, path, metadata={"format": "pt"})


def randomize(name: str, values: Any) -> None:
    """Set weights so that the next token depends on all tokens of a prompt: sharp attention, no zero bias, no norm of
    one."""
    import torch

    if not values.is_floating_point() or name.endswith(("A_log", "dt_bias")):
        return
    noise = torch.randn_like(values)
    if "embed_tokens" in name:
        values.copy_(noise)
    elif values.dim() > 1:
        sharp = 2.0 if "_proj" in name and "self_attn" in name and "o_proj" not in name else 1.0
        values.copy_(noise * sharp / math.sqrt(values.shape[-1]))
    elif name.endswith("sinks"):
        values.copy_(noise.bfloat16())  # SGLang keeps sinks in bfloat16
    else:
        values.add_(noise * 0.1)
