"""Tiny models of every family that GGUF can express: random weights in all places, settings that
are not the defaults.
"""

import torch
import transformers

import families

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 310,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
FACTORS = [1.0 + 0.1 * n for n in range(8)]
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": FACTORS,
    "long_factor": [2 * x for x in FACTORS],
    "original_max_position_embeddings": 256,
}

MODELS: dict[str, tuple[str, dict]] = {
    "llama": ("Llama", {"rms_norm_eps": 1e-3}),
    "llama with biases": ("Llama", {"attention_bias": True, "tie_word_embeddings": True}),
    "llama 3": ("Llama", {"rope_parameters": LLAMA3, "head_dim": 24}),
    "llama, linear": ("Llama", {"rope_parameters": LINEAR}),
    "llama, yarn": ("Llama", {"rope_parameters": YARN}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 8}),
    "mixtral": (
        "Mixtral",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    ),
    "qwen2": ("Qwen2", {"rms_norm_eps": 1e-3, "tie_word_embeddings": True}),
    "qwen2_moe": ("Qwen2Moe", {**EXPERTS, "shared_expert_intermediate_size": 48}),
    "qwen3": ("Qwen3", {"head_dim": 24}),
    "qwen3_moe": ("Qwen3Moe", {**EXPERTS, "head_dim": 8, "norm_topk_prob": True}),
    "olmoe": ("Olmoe", {"num_experts": 6, "num_experts_per_tok": 2, "num_key_value_heads": 4}),
    "gemma2": ("Gemma2", {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 16}),
    "gemma3": (
        "Gemma3Text",
        {"num_hidden_layers": 6, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 16},
    ),
    "phi3": (
        "Phi3",
        {"sliding_window": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    ),
    "phi3, longrope": (
        "Phi3",
        {
            "sliding_window": None,
            "rope_parameters": LONGROPE,
            "original_max_position_embeddings": 256,
            "max_position_embeddings": 512,
        },
    ),
    "smollm3": (
        "SmolLM3",
        {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0], "use_sliding_window": False},
    ),
    "olmo2": ("Olmo2", {}),
    "glm4": ("Glm4", {"head_dim": 16}),
    "granite": (
        "Granite",
        {
            "logits_scaling": 3.0,
            "embedding_multiplier": 2.0,
            "residual_multiplier": 0.6,
            "attention_multiplier": 0.2,
        },
    ),
    "gpt_oss": (
        "GptOss",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": 16,
            "sliding_window": 16,
            "rope_parameters": YARN | {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
        },
    ),
}


def build(name, **changes):
    """In evaluation mode, in fp32."""
    kind, settings = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **settings, **changes})
    model = getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")(config).float().eval()
    families.randomise(model)
    with torch.no_grad():  # so that distributions are not flat
        model.get_output_embeddings().weight.mul_(3)
    return model
