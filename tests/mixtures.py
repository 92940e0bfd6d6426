"""Small native mixtures with random weights."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm

from chronicals.moe import ChronicalsMoeConfig, ChronicalsMoeForCausalLM

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "sliding_window": 8,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "lookahead_rank": 8,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
WINDOW = SIZES["sliding_window"]


def configuration(**changes: Any) -> ChronicalsMoeConfig:
    return ChronicalsMoeConfig(**{**SIZES, **changes})


def mixture(seed: int = 0, random: bool = True, **changes: Any) -> ChronicalsMoeForCausalLM:
    """In evaluation mode and fp32; all parameters random, for a norm of one or a zero hides what
    is left out.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = ChronicalsMoeForCausalLM(configuration(**changes)).eval()
        if random:
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
                else:
                    torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model


def in_fp64(model: ChronicalsMoeForCausalLM) -> ChronicalsMoeForCausalLM:
    """The model in fp64, and its norms, which transformers computes in fp32 whatever the model
    is in; grouped products have no fp64."""
    model.double().set_experts_implementation("eager")
    for norm in model.modules():
        if isinstance(norm, Qwen3MoeRMSNorm):
            shape = norm.weight.shape
            epsilon = norm.variance_epsilon
            norm.forward = partial(
                F.rms_norm, normalized_shape=shape, weight=norm.weight, eps=epsilon
            )
    return model


def token_ids(*shape: int) -> torch.Tensor:
    """Random ids of no special token."""
    return torch.randint(2, SIZES["vocab_size"], shape)
