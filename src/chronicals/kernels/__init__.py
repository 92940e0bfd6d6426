"""Kernels, one operation a file; they import torch and triton and nothing else of this package."""

from chronicals.kernels.adamw import fused_adamw_
from chronicals.kernels.fp8 import fp8_quantize
from chronicals.kernels.fp8_experts import fp8_quantize_experts
from chronicals.kernels.fp8_grouped_product import fp8_grouped_product
from chronicals.kernels.fp8_linear import fp8_linear
from chronicals.kernels.fused_experts import fused_experts
from chronicals.kernels.glu import fused_geglu, fused_swiglu
from chronicals.kernels.grouped_product import grouped_product
from chronicals.kernels.grouped_weight_gradient import grouped_weight_gradient
from chronicals.kernels.layernorm import fused_layernorm
from chronicals.kernels.linear_cross_entropy import fused_cross_entropy, linear_cross_entropy
from chronicals.kernels.linear_distillation import linear_distillation
from chronicals.kernels.qk_norm_rope import fused_qk_norm_rope
from chronicals.kernels.qk_rope import fused_qk_rope
from chronicals.kernels.rmsnorm import fused_add_rmsnorm, fused_rmsnorm
from chronicals.kernels.softmax import fused_softmax
from chronicals.kernels.token_log_probability import token_log_probability

__all__ = [
    "fp8_grouped_product",
    "fp8_linear",
    "fp8_quantize",
    "fp8_quantize_experts",
    "fused_adamw_",
    "fused_add_rmsnorm",
    "fused_cross_entropy",
    "fused_experts",
    "fused_geglu",
    "fused_layernorm",
    "fused_qk_norm_rope",
    "fused_qk_rope",
    "fused_rmsnorm",
    "fused_softmax",
    "fused_swiglu",
    "grouped_product",
    "grouped_weight_gradient",
    "linear_cross_entropy",
    "linear_distillation",
    "token_log_probability",
]


def __dir__() -> list[str]:
    return sorted(__all__)
