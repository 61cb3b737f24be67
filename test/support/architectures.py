"""Checkpoints of the architectures that prefill servers run, by name.

To add an architecture, append it to ``ALL`` (event loops alternate) and add it to the table of models in docs/LAPS.md.
test_slices_models.py compares its tokens with those of transformers, and its pauses with the table. LAPS itself has no
list of models, see ``sglang_laps.passes.layers``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import more_models
import pictures

from benchmark.rig import checkpoints
from benchmark.rig.checkpoints import DEEPSEEK, DEEPSEEK3, EXPERTS, Architecture

NEMOTRON = ("mamba", "mlp", "mamba", "attention", "mlp", "mamba")
MIMO_ROPE = {
    f"{kind}_attention": {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": 0.334}
    for kind, theta in (("full", 5e6), ("sliding", 1e4))
}
ALL: Mapping[str, Architecture] = {
    "qwen2": Architecture("Qwen2", {}),
    "qwen2moe": Architecture("Qwen2Moe", {**EXPERTS, "num_experts": 8, "shared_expert_intermediate_size": 64}),
    "qwen3": Architecture("Qwen3", {"head_dim": 16}),
    "qwen3moe": Architecture("Qwen3Moe", {**EXPERTS, "head_dim": 16, "num_experts": 8, "norm_topk_prob": True}),
    "qwen3next": Architecture(
        "Qwen3Next",
        {
            **EXPERTS,
            **{"head_dim": 32, "num_experts": 8, "shared_expert_intermediate_size": 64},
            **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
            **{"linear_key_head_dim": 32, "linear_value_head_dim": 32},
        },
        {"full_attention_interval": 4},
        embedding=5.0,  # makes its draft right half of the time
    ),
    "nemotronh": Architecture(
        "NemotronH",
        {
            **{"head_dim": 16, "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16},
            # transformers raises time steps below this minimum, SGLang does not.
            **{"n_groups": 2, "chunk_size": 64, "layers_block_type": list(NEMOTRON), "time_step_min": 1e-9},
        },
        {"layers_block_type": list(NEMOTRON), "mtp_layers_block_type": ["attention", "mlp"], "mamba_n_groups": 2},
    ),
    "llama": Architecture("Llama", {}),
    "mixtral": Architecture("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gemma2": Architecture(
        "Gemma2",
        {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 128, "tie_word_embeddings": True},
        {"hidden_act": "gelu_pytorch_tanh"},
    ),
    "gemma3": Architecture(
        "Gemma3",
        {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 128, "tie_word_embeddings": True},
        config="Gemma3TextConfig",
    ),
    "glm4": Architecture("Glm4", {"head_dim": 16}),
    "glm4moe": Architecture(
        "Glm4Moe",
        {
            **EXPERTS,
            **{"head_dim": 16, "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1},
            **{"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.5},
        },
        nextn=True,
    ),
    "gptoss": Architecture(
        "GptOss", {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 128}
    ),
    "mimov2": Architecture(
        "MiMoV2Flash",
        {**EXPERTS, "head_dim": 24, "v_head_dim": 16, "n_routed_experts": 8, "sliding_window": 128},
        {
            **{"hybrid_layer_pattern": [0, 1, 1, 1, 1, 0], "sliding_window_size": 127},
            **{"swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_head_dim": 24, "swa_v_head_dim": 16},
            **{"add_swa_attention_sink_bias": True, "moe_layer_freq": [0, 1, 1, 1, 1, 1], "layernorm_epsilon": 1e-5},
            # transformers reads the entries by layer type, SGLang only ``rope_type``.
            **{"rope_parameters": {"rope_type": "default", **MIMO_ROPE}, "partial_rotary_factor": 0.334},
            **{"rope_theta": 5e6, "swa_rope_theta": 1e4},
            **{"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
        },
        embedding=5.0,
    ),
    "deepseek2": Architecture(
        "DeepseekV2",
        {**DEEPSEEK, "q_lora_rank": None, "topk_method": "group_limited_greedy"},
        {"moe_layer_freq": 1, "ep_size": 1, "scoring_func": "softmax"},
    ),
    "deepseek3": DEEPSEEK3,
}
NAMES = tuple(ALL)
"""Names for which ``make`` writes a text checkpoint."""


def make(folder: Path, name: str) -> Path:
    """Write the checkpoint of this name under ``folder`` unless it exists; return its path. Raises KeyError for a name
    that is neither in NAMES, nor in ``pictures.NAMES``, nor in ``more_models.ALL``."""
    if name in pictures.NAMES:
        return pictures.make(folder, name)
    return checkpoints.make(folder, name, {**more_models.ALL, **ALL}[name])
