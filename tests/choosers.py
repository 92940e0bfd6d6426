"""Small mixtures of transformers whose routers choose in different ways, with random weights."""

from typing import Any

import torch
import transformers

import families
from chronicals.batch import Batch
from chronicals.moe.lookahead.choosing import Choice
from chronicals.moe.routers import mixture_layers

K = 2
E = 16
LATENT = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}
GROUPS = {"n_group": 4, "topk_group": 2}
SIZES = {
    **families.SIZES,
    "vocab_size": 300,
    "num_hidden_layers": 3,
    "num_experts_per_tok": K,
    "moe_intermediate_size": 16,
}
DEEPSEEK = {
    **SIZES,
    **LATENT,
    **GROUPS,
    "num_key_value_heads": 4,
    "n_routed_experts": E,
    "first_k_dense_replace": 1,
}
CLASSES = {
    "deepseek_v3": ("DeepseekV3", DEEPSEEK, Choice("sigmoid", True, 4, 2, 2)),
    "deepseek_v2 in groups": (
        "DeepseekV2",
        {**DEEPSEEK, "topk_method": "group_limited_greedy", "topk_group": 1},
        Choice("softmax", False, 4, 1, 1),
    ),
    "deepseek_v2": ("DeepseekV2", {**DEEPSEEK, "topk_method": "greedy", "topk_group": 1}, Choice()),
    "glm4_moe": (
        "Glm4Moe",
        {**SIZES, "n_routed_experts": E, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
        Choice("sigmoid", True),
    ),
    "ernie4_5_moe": (
        "Ernie4_5_Moe",
        {**SIZES, "moe_num_experts": E, "moe_k": K, "moe_layer_start_index": 1},
        Choice("softmax", True),
    ),
    "qwen3_moe": ("Qwen3Moe", {**SIZES, "num_experts": E, "head_dim": 8}, Choice()),
}


def build(family: str) -> Any:
    """Random weights, routers whose logits differ, and corrections that change most choices."""
    name, sizes, _ = CLASSES[family]
    torch.manual_seed(1)
    model = getattr(transformers, f"{name}ForCausalLM")(
        getattr(transformers, f"{name}Config")(**sizes)
    ).float()
    families.randomise(model.eval())
    for layer in mixture_layers(model):
        torch.nn.init.normal_(layer.gate, std=0.3)
        if layer.correction is not None:
            layer.correction.normal_(std=0.3 if CLASSES[family][2].scores == "sigmoid" else 0.05)
    return model


def batch(tokens: int = 300) -> Batch:
    ids = torch.randint(3, 300, (tokens,))
    return Batch(
        ids, ids.roll(-1), torch.arange(tokens) % 50, torch.arange(0, tokens + 1, 50).int(), 50
    )
