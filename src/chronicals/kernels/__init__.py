"""One operation a file; knows torch and triton and nothing else of ours."""

from chronicals.kernels.glu import fused_geglu, fused_swiglu
from chronicals.kernels.linear_cross_entropy import fused_cross_entropy, linear_cross_entropy
from chronicals.kernels.qk_rope import fused_qk_rope
from chronicals.kernels.rmsnorm import fused_add_rmsnorm, fused_rmsnorm

__all__ = [
    "fused_add_rmsnorm",
    "fused_cross_entropy",
    "fused_geglu",
    "fused_qk_rope",
    "fused_rmsnorm",
    "fused_swiglu",
    "linear_cross_entropy",
]
