"""Further architectures, tested before a release (``LAPS_MORE_MODELS=1``), because their servers take some minutes."""

from __future__ import annotations

from collections.abc import Mapping

from benchmark.rig.checkpoints import DEEPSEEK, EXPERTS, Architecture

HEADS = {"head_dim": 16}
WINDOWS = {**HEADS, "sliding_window": 128}
LAYERS = {"layer_types": [*["sliding_attention"] * 5, "full_attention"]}
LOCAL = {"num_local_experts": 8, "num_experts_per_tok": 2}
EIGHT = {**EXPERTS, "num_experts": 8}
LINEAR = {
    **{"head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"linear_key_head_dim": 32, "linear_value_head_dim": 32},
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1}
INTERVAL = {"full_attention_interval": 4}
ALL: Mapping[str, Architecture] = {
    "apertus": Architecture("Apertus", {}),
    "arcee": Architecture("Arcee", {}),
    "cohere": Architecture("Cohere", {}),
    "cohere2": Architecture("Cohere2", WINDOWS),
    "falconh1": Architecture(
        "FalconH1",
        {**HEADS, **MAMBA, "mamba_n_heads": 4, "mamba_d_ssm": 64, "mamba_chunk_size": 64},
    ),
    "gemma": Architecture("Gemma", HEADS),
    "glm4moelite": Architecture("Glm4MoeLite", {**DEEPSEEK, "q_lora_rank": 64, "n_group": 1}),
    "gptbigcode": Architecture("GPTBigCode", {}),
    "granite": Architecture("Granite", {}),
    "granitemoe": Architecture("GraniteMoe", LOCAL),
    "granitemoehybrid": Architecture(
        "GraniteMoeHybrid",
        {
            **LOCAL,
            **MAMBA,
            "shared_intermediate_size": 64,
            "mamba_expand": 2,
            "layer_types": ["mamba", "attention"] * 3,
        },
    ),
    "hyv3": Architecture(
        "HYV3",
        {**HEADS, **EIGHT, "num_shared_experts": 1, "first_k_dense_replace": 1},
        {"route_norm": True, "moe_router_enable_expert_bias": False},
    ),
    "laguna": Architecture("Laguna", {**WINDOWS, **LAYERS, **EIGHT}),
    "mellum": Architecture("Mellum", {**WINDOWS, **LAYERS, **EIGHT}),
    "minicpm3": Architecture("MiniCPM3", {}),
    "ministral3": Architecture("Ministral3", HEADS),
    "mistral": Architecture("Mistral", HEADS),
    "olmo2": Architecture("Olmo2", {}),
    "olmoe": Architecture("Olmoe", {**LOCAL, "num_experts": 8, "num_key_value_heads": 4}),
    "phi3": Architecture("Phi3", {}),
    "qwen35": Architecture("Qwen3_5", LINEAR, INTERVAL, config="Qwen3_5TextConfig"),
    "qwen35moe": Architecture(
        "Qwen3_5Moe",
        {**LINEAR, **EIGHT, "shared_expert_intermediate_size": 64},
        {**INTERVAL, "norm_topk_prob": True},
        config="Qwen3_5MoeTextConfig",
    ),
    "stablelm": Architecture("StableLm", {}),
    "starcoder2": Architecture("Starcoder2", {}),
}
