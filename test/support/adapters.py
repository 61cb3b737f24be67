"""Small seeded additions to the checkpoints of ``architectures``: LoRA adapters, and draft models."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import architectures

from benchmark.rig import checkpoints, model

RANK, ALPHA = 8, 16
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
EAGLE = ("qwen2", "llama")
"""Architectures with an EAGLE draft in SGLang, for which ``make_draft`` makes one."""


def make_lora(folder: Path, base: Path, seed: int) -> Path:
    """Make a LoRA adapter (PEFT's format) of all attention projections of the checkpoint ``base`` and return its path.

    The adapter just changes most answers; sharper attention would amplify rounding errors beyond the tests' tolerance.
    """

    def write(tmp: Path) -> None:
        import torch
        from safetensors.torch import load_file, save_file

        made, random = {}, torch.Generator().manual_seed(seed)
        for name, values in load_file(base / "model.safetensors").items():
            module = name.removesuffix(".weight")
            if module == name or not module.endswith(TARGETS):
                continue
            rows, columns = values.shape
            a = torch.randn(RANK, columns, generator=random) / math.sqrt(columns)
            b = torch.randn(rows, RANK, generator=random) / (4.0 * math.sqrt(RANK))
            made[f"base_model.model.{module}.lora_A.weight"] = a
            made[f"base_model.model.{module}.lora_B.weight"] = b
        save_file(made, tmp / "adapter_model.safetensors", metadata={"format": "pt"})
        config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": ALPHA, "bias": "none"}
        config |= {"target_modules": list(TARGETS), "base_model_name_or_path": base.name}
        (tmp / "adapter_config.json").write_text(json.dumps(config))

    return model.once(folder / f"{base.name}-adapter-{seed}", write)


def make_misfit(folder: Path, adapter: Path, kind: str) -> Path:
    """Make an adapter that does not fit the model of ``adapter`` and return its path. ``kind``: a name in MISFITS."""

    def write(tmp: Path) -> None:
        from safetensors.torch import load_file, save_file

        weights = {n: MISFITS[kind](n, v).clone() for n, v in load_file(adapter / "adapter_model.safetensors").items()}
        if kind == "another module":
            weights = {n.replace("o_proj", "gate_proj"): v for n, v in weights.items()}
        save_file(weights, tmp / "adapter_model.safetensors", metadata={"format": "pt"})
        (tmp / "adapter_config.json").write_bytes((adapter / "adapter_config.json").read_bytes())

    return model.once(folder / f"{adapter.name}-{kind.replace(' ', '-')}", write)


MISFITS: dict[str, Callable[[str, Any], Any]] = {
    "a wider model": lambda name, v: v.repeat(1, 2) if "lora_A" in name else v.repeat(2, 1),
    "a lower rank": lambda name, v: v[:4] if "lora_A" in name else v[:, :4],
    "another module": lambda name, v: v,
}
"""Changes of an adapter's weights, by what is wrong then. The adapter's own configuration does not tell."""


def merge_adapter(model: Any, adapter: Path) -> None:
    """Add an adapter to the weights of a model of transformers, as a server does."""
    from safetensors.torch import load_file

    weights = load_file(adapter / "adapter_model.safetensors")
    parameters = dict(model.named_parameters())
    for name, a in weights.items():
        if "lora_A" in name:
            target = name.removeprefix("base_model.model.").replace(".lora_A", "")
            parameters[target].data += weights[name.replace("lora_A", "lora_B")] @ a * (ALPHA / RANK)


def make_draft(folder: Path, name: str) -> Path:
    """Make an EAGLE draft of one layer for the checkpoint of this name and return its path. Raises KeyError if the name
    is not in EAGLE."""
    if name not in EAGLE:
        raise KeyError(name)
    chosen = architectures.ALL[name]

    def write(tmp: Path) -> None:
        import torch
        from safetensors.torch import save_file

        made = checkpoints.random_weights(chosen, layers=1)
        size = checkpoints.SIZES["hidden_size"]
        weights = {n.removeprefix("model."): v.contiguous() for n, v in made.state_dict().items()}
        # The draft uses the target's embedding and head; EAGLE has no norm before or after its layer.
        for left_out in ("lm_head.weight", "embed_tokens.weight", "norm.weight", "layers.0.input_layernorm.weight"):
            del weights[left_out]
        weights["fc.weight"] = torch.randn(size, 2 * size) / math.sqrt(2 * size)
        weights["fc.bias"] = torch.zeros(size)
        save_file(weights, tmp / "model.safetensors", metadata={"format": "pt"})
        made.config.architectures = [f"{chosen.family}ForCausalLMEagle"]
        made.config.save_pretrained(tmp)

    return model.once(folder / f"{name}-eagle-{chosen.key}", write)


def make_fitted_draft(folder: Path, base: Path) -> Path:
    """Make an EAGLE draft of one layer for the Qwen2 checkpoint ``base``, fitted to the checkpoint's own answers, and
    return its path. The draft's attention has little influence."""

    def write(tmp: Path) -> None:
        import torch
        from safetensors.torch import save_file
        from transformers import AutoConfig, Qwen2ForCausalLM

        tokens, states, expected = _collect_states(base)[0]
        given = torch.cat((tokens, states, torch.ones(len(tokens), 1)), -1)
        fitted = torch.linalg.lstsq(given, expected).solution
        config = AutoConfig.from_pretrained(base)
        config.num_hidden_layers, config.layer_types = 1, config.layer_types[:1]
        torch.manual_seed(1)
        layer = {n: v for n, v in Qwen2ForCausalLM(config).state_dict().items() if n.startswith("model.layers.")}
        weights = {n.removeprefix("model."): v.contiguous() for n, v in layer.items() if "input_layernorm" not in n}
        weights["layers.0.mlp.down_proj.weight"].zero_()
        weights["fc.weight"], weights["fc.bias"] = fitted[:-1].T.contiguous(), fitted[-1].contiguous()
        save_file(weights, tmp / "model.safetensors", metadata={"format": "pt"})
        config.architectures = ["Qwen2ForCausalLMEagle"]
        config.save_pretrained(tmp)

    return model.once(folder / f"{base.name}-follower", write)


def make_mtp_layer(folder: Path, base: Path) -> Path:
    """Make the MTP layer with which the Qwen3-Next or Qwen3.5 checkpoint ``base`` predicts a further token, fitted to
    its own answers, and return the layer's path. The layer's attention has little influence."""

    def write(tmp: Path) -> None:
        import torch
        from safetensors.torch import load_file, save_file
        from torch.nn.functional import rms_norm
        from transformers import AutoConfig

        tokens, states, expected = _collect_states(base)[0]
        config = AutoConfig.from_pretrained(base).get_text_config()
        size, written = config.hidden_size, load_file(base / "model.safetensors")
        given = torch.cat([rms_norm(x, (size,), eps=config.rms_norm_eps) for x in (tokens, states)], -1)
        fitted = torch.linalg.lstsq(given, expected).solution
        layer = f"layers.{config.layer_types.index('full_attention')}."
        weights = {f"mtp.layers.0.{n.partition(layer)[2]}": v for n, v in written.items() if f".{layer}" in n}
        for name, values in weights.items():
            if name.endswith("down_proj.weight"):
                values.zero_()
            elif name.endswith("o_proj.weight"):
                values.div_(100.0)
        for norm in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
            weights[f"mtp.{norm}.weight"] = torch.zeros(size)
        weights["mtp.fc.weight"] = fitted.T.contiguous()
        weights |= {n: v for n, v in written.items() if n.endswith("embed_tokens.weight") or n == "lm_head.weight"}
        save_file(weights, tmp / "model.safetensors", metadata={"format": "pt"})
        (tmp / "config.json").write_bytes((base / "config.json").read_bytes())

    return model.once(folder / f"{base.name}-mtp", write)


STEPS = 3
"""Number of layers that ``make_mimo_mtp_layers`` makes, one for each further token."""


def make_mimo_mtp_layers(folder: Path, base: Path) -> Path:
    """Make the MTP layers with which the MiMo-V2 checkpoint ``base`` predicts STEPS further tokens, fitted to its own
    answers, and return the layers' path. The layers' attention has little influence."""

    def write(tmp: Path) -> None:
        import torch
        from safetensors.torch import load_file, save_file
        from torch.nn.functional import rms_norm
        from transformers import AutoConfig

        config, written = AutoConfig.from_pretrained(base), load_file(base / "model.safetensors")
        size, norm = config.hidden_size, written["model.norm.weight"]
        weights = {n: written[n] for n in ("model.embed_tokens.weight", "lm_head.weight")}
        for step, (tokens, states, expected) in enumerate(_collect_states(base, STEPS)):
            # The input of an MTP layer is the state before the target's last norm; the layer normalizes it itself.
            given = torch.cat([rms_norm(x, (size,)) for x in (tokens, states / norm)], -1)
            fitted = torch.linalg.lstsq(given, expected / norm).solution
            layer = f"model.mtp.layers.{step}."
            for name, values in written.items():
                if name.startswith("model.layers.1.") and ".mlp." not in name:
                    weights[name.replace("model.layers.1.", layer)] = values.clone()
            weights[f"{layer}self_attn.o_proj.weight"] /= 100.0
            for name in ("gate", "up", "down"):
                dense = written[f"model.layers.0.mlp.{name}_proj.weight"]
                weights[f"{layer}mlp.{name}_proj.weight"] = torch.zeros_like(dense)
            for name in ("enorm", "hnorm"):
                weights[f"{layer}{name}.weight"] = torch.ones(size)
            weights[f"{layer}final_layernorm.weight"] = norm.clone()
            weights[f"{layer}eh_proj.weight"] = fitted.T.contiguous()
        save_file(weights, tmp / "model.safetensors", metadata={"format": "pt"})
        (tmp / "config.json").write_bytes((base / "config.json").read_bytes())

    return model.once(folder / f"{base.name}-mtp", write)


def _collect_states(base: Path, steps: int = 1) -> list[tuple[Any, Any, Any]]:
    """Return, for each of ``steps`` draft steps, inputs and result from many answers of the checkpoint ``base``: the
    embedding of the newest token, the state at the draft's start, the state after the newest token ([tokens, size])."""
    import torch
    from transformers import AutoModelForCausalLM

    target: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    torch.manual_seed(1)
    prompts = torch.randint(3, 2000, (24, 60))
    with torch.no_grad():
        told = target.generate(prompts, max_new_tokens=80, min_new_tokens=80, do_sample=False, pad_token_id=0)
        states = target(told, output_hidden_states=True).hidden_states[-1][:, 60:]
        tokens = target.get_input_embeddings()(told)[:, 60:]
    return [
        (tokens[:, n:].flatten(0, 1), states[:, :-n].flatten(0, 1), states[:, n:].flatten(0, 1))
        for n in range(1, steps + 1)
    ]


def make_eagle3_draft(folder: Path, base: Path) -> Path:
    """Make an EAGLE3 draft of one layer with random weights for the checkpoint ``base`` and return its path."""

    def write(tmp: Path) -> None:
        import torch
        from safetensors.torch import save_file
        from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

        sizes = AutoConfig.from_pretrained(base).to_dict()
        names = (
            *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size"),
            "max_position_embeddings",
        )
        config: Any = LlamaConfig(**{n: sizes[n] for n in names}, num_hidden_layers=1)
        torch.manual_seed(1)
        weights = {n: v.contiguous() for n, v in LlamaForCausalLM(config).state_dict().items()}
        kept = {n.removeprefix("model."): v for n, v in weights.items() if "embed" not in n and "lm_head" not in n}
        # Attention input: embedding and state. ``fc`` input: three states of the target.
        for name in ("q_proj", "k_proj", "v_proj"):
            kept[f"layers.0.self_attn.{name}.weight"] = kept[f"layers.0.self_attn.{name}.weight"].repeat(1, 2)
        size = config.hidden_size
        kept["layers.0.hidden_norm.weight"] = torch.ones(size)
        kept["fc.weight"] = torch.randn(size, 3 * size) / math.sqrt(3 * size)
        save_file(kept, tmp / "model.safetensors", metadata={"format": "pt"})
        config.architectures, config.draft_vocab_size = ["LlamaForCausalLMEagle3"], None
        config.save_pretrained(tmp)
        path = tmp / "config.json"
        # SGLang's default choice of states needs a model with more layers.
        states = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
        more = {"draft_vocab_size": None, "eagle_config": states}
        path.write_text(json.dumps({**json.loads(path.read_text()), **more}))

    return model.once(folder / f"{base.name}-eagle3", write)
