"""Replace parts of a Hugging Face model by kernels.

The parts are norms, gated MLPs, rotary embedding, attention, experts, the loss and whole layers.
"""

from chronicals.patching.decoder_layer import (
    fuse_weights,
    packed_products,
    recompute_norms_and_units,
)
from chronicals.patching.fp8_experts import (
    experts_in_fp8,
    offload_frozen_experts,
    run_experts_in_fp8,
)
from chronicals.patching.fused_weights import forget_row_norms, unfuse_weights
from chronicals.patching.layer_policies import (
    forget_policies,
    has_gated_mlps,
    layers_in_fp8,
    offload_frozen_weights,
    run_in_format,
    run_in_fp8,
    tile_layers,
    tile_mlps,
    untile_layers,
    untile_mlps,
)
from chronicals.patching.patch import (
    Left,
    PatchReport,
    Replaced,
    patch_model,
    patch_parts,
    unpatch_model,
)
from chronicals.patching.wide_residuals import residual_dtypes

__all__ = [
    "Left",
    "PatchReport",
    "Replaced",
    "experts_in_fp8",
    "forget_policies",
    "forget_row_norms",
    "fuse_weights",
    "has_gated_mlps",
    "layers_in_fp8",
    "offload_frozen_experts",
    "offload_frozen_weights",
    "packed_products",
    "patch_model",
    "patch_parts",
    "recompute_norms_and_units",
    "residual_dtypes",
    "run_experts_in_fp8",
    "run_in_format",
    "run_in_fp8",
    "tile_layers",
    "tile_mlps",
    "unfuse_weights",
    "unpatch_model",
    "untile_layers",
    "untile_mlps",
]


def __dir__() -> list[str]:
    return sorted(__all__)
