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
FOUR = {"num_key_value_heads": 4}
"""One head of keys for each of queries; SGLang looks at this field also where transformers has none."""
CONVOLUTIONS = {"layer_types": ["conv", "conv", "full_attention"] * 2}
EMBEDDED = {"vocab_size_per_layer_input": 2048, "hidden_size_per_layer_input": 16}
DOTS = {"n_routed_experts": 8, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1}
INTERVAL = {"full_attention_interval": 4}
ALL: Mapping[str, Architecture] = {
    "apertus": Architecture("Apertus", {}),
    "arcee": Architecture("Arcee", {}),
    "cohere": Architecture("Cohere", {}),
    "cohere2": Architecture("Cohere2", WINDOWS),
    "cohere2moe": Architecture("Cohere2Moe", {**WINDOWS, **LAYERS, **EIGHT}),
    "dots1": Architecture("Dots1", {**HEADS, **EXPERTS, **DOTS}),
    "ernie45": Architecture("Ernie4_5", HEADS, {"architectures": ["Ernie4_5_ForCausalLM"]}),
    "falconh1": Architecture(
        "FalconH1",
        {**HEADS, **MAMBA, "mamba_n_heads": 4, "mamba_d_ssm": 64, "mamba_chunk_size": 64},
    ),
    "gemma": Architecture("Gemma", HEADS),
    "gemma4": Architecture(
        "Gemma4",
        {**WINDOWS, **LAYERS, "global_head_dim": 16, "num_kv_shared_layers": 0, **EMBEDDED},
        {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 16},
        config="Gemma4TextConfig",
    ),
    "glm4moelite": Architecture("Glm4MoeLite", {**DEEPSEEK, "q_lora_rank": 64, "n_group": 1}),
    "gptbigcode": Architecture("GPTBigCode", {}),
    "gptj": Architecture("GPTJ", {"rotary_dim": 16, **FOUR}),
    "gptneox": Architecture("GPTNeoX", FOUR),
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
    "granitemoeshared": Architecture("GraniteMoeShared", {**LOCAL, "shared_intermediate_size": 64}),
    "granitemoeswa": Architecture("GraniteMoeSWA", {**LOCAL, **WINDOWS, **LAYERS}),
    "graniteswa": Architecture("GraniteSWA", {**WINDOWS, **LAYERS}),
    "helium": Architecture("Helium", HEADS),
    "hyv3": Architecture(
        "HYV3",
        {**HEADS, **EIGHT, "num_shared_experts": 1, "first_k_dense_replace": 1},
        {"route_norm": True, "moe_router_enable_expert_bias": False},
    ),
    "laguna": Architecture("Laguna", {**WINDOWS, **LAYERS, **EIGHT}),
    "lfm2": Architecture("Lfm2", {**CONVOLUTIONS, "block_auto_adjust_ff_dim": False}),
    "lfm2moe": Architecture("Lfm2Moe", {**CONVOLUTIONS, **EIGHT, "num_dense_layers": 1}),
    "mellum": Architecture("Mellum", {**WINDOWS, **LAYERS, **EIGHT}),
    "minicpm3": Architecture("MiniCPM3", {}),
    "minimaxm2": Architecture(
        "MiniMaxM2",
        {**HEADS, **LOCAL, "intermediate_size": 64},
        # The norm of queries and keys in SGLang needs a GPU.
        {"scoring_func": "sigmoid", "rotary_dim": 16, "use_qk_norm": False, "num_mtp_modules": 0},
    ),
    "ministral3": Architecture("Ministral3", HEADS),
    "mistral": Architecture("Mistral", HEADS),
    "olmo": Architecture("Olmo", FOUR),
    "olmo2": Architecture("Olmo2", {}),
    "olmo3": Architecture("Olmo3", {**WINDOWS, **LAYERS}),
    "olmoe": Architecture("Olmoe", {**LOCAL, "num_experts": 8, "num_key_value_heads": 4}),
    "opt": Architecture("OPT", {"ffn_dim": 128, "word_embed_proj_dim": 64, **FOUR}),
    "persimmon": Architecture("Persimmon", FOUR),
    "phi": Architecture("Phi", {"intermediate_size": 256, **FOUR}),
    "phi3": Architecture("Phi3", {}),
    "phimoe": Architecture(
        "Phimoe",
        {**LOCAL, "lm_head_bias": True, "attention_bias": True},
        {"architectures": ["PhiMoEForCausalLM"]},
    ),
    "qwen35": Architecture("Qwen3_5", LINEAR, INTERVAL, config="Qwen3_5TextConfig"),
    "qwen35moe": Architecture(
        "Qwen3_5Moe",
        {**LINEAR, **EIGHT, "shared_expert_intermediate_size": 64},
        {**INTERVAL, "norm_topk_prob": True},
        config="Qwen3_5MoeTextConfig",
    ),
    "seedoss": Architecture("SeedOss", HEADS),
    "smollm3": Architecture("SmolLM3", {}),
    "stablelm": Architecture("StableLm", {}),
    "starcoder2": Architecture("Starcoder2", {}),
}
