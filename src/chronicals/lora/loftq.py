"""LoftQ: adapters over a base in 4 bits start at the best approximation of its error.

The approximation of the quantisation error has the adapters' rank (Li et al., 2023, arXiv
2310.08659, algorithm 1 with T = 1).

    Q = q(W),   W − Q = U S Vᵀ:   A = √(S/s) Vᵀ,   B = U √(S/s)        of the r largest values, so that Q + s · B A is nearest W

Q is the plain NF4 quantisation of W, so the adapter fits a base that anybody quantises. Further
alternations (Q = q(W − s · B A)) would give another base, of which no file exists; they are not
done.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from chronicals.lora.config import LoRAConfig
from chronicals.lora.embeddings import ends_in
from chronicals.lora.layers import linear_adapters
from chronicals.lora.starting_values import Start, largest_parts
from chronicals.models.four_bits import WATCHED
from chronicals.quantization import PackedWeight, packed_weight


class LoftQ:
    """Starting values, computed layer by layer while a model is quantised: W is gone afterwards.

    ``load_model(..., watch=...)`` and ``quantise_layers(model, watch)`` call it for each layer, and
    leave it with the model.

    Args:
        config: configuration of the adapters that will be attached; other layers are skipped.

    Attributes:
        starts: A ``[r, in]`` and B ``[out, r]`` by path, fp32 in host memory.
    """

    def __init__(self, config: LoRAConfig):
        self.config = config
        self.starts: dict[str, Start] = {}

    @torch.no_grad()
    def __call__(self, path: str, weight: Tensor, packed: PackedWeight) -> None:
        """Compute the starting values of a layer.

        Args:
            path: path of the layer.
            weight: W, ``[out, in]``.
            packed: the quantised weight, on the same device.

        Raises:
            ValueError: the rank is larger than the weight.
        """
        # whether the layer may be a target; ``apply_lora`` decides which layers are
        wanted = self.config.target_modules
        if wanted is None or wanted == "all-linear":
            may_be_target = True
        elif isinstance(wanted, str):
            may_be_target = re.fullmatch(wanted, path) is not None
        else:
            may_be_target = ends_in(path, *wanted)
        if not may_be_target:
            return

        shape = self.config.at(path)
        if shape.rank > min(weight.shape):
            raise ValueError(
                f"lora_init='loftq': the adapter of {path} has rank {shape.rank}, its weight "
                f"{tuple(weight.shape)} only {min(weight.shape)}; set lora_rank, or "
                "lora_rank_pattern for this layer"
            )

        lost = weight.float() - packed.dense().float()
        start_a, start_b = largest_parts(lost, shape.rank, shape.scale)
        self.starts[path] = start_a.cpu(), start_b.cpu()


def check_quantised(model: Any, paths: Collection[str], config: LoRAConfig) -> None:
    """Raise ValueError if a layer has no starting values.

    It is then not in 4 bits, or was quantised without ``LoftQ``.
    """
    watch = getattr(model, WATCHED, None)
    known = watch.starts if isinstance(watch, LoftQ) else {}
    for path in paths:
        packed = packed_weight(model.get_submodule(path))
        if packed is None or packed.recipe is None:
            raise ValueError(
                f"lora_init='loftq': the weight of {path} is not in 4 bits, of which it makes up "
                "for the loss; set quantization='nf4', leave the layer out of lora_target_modules, "
                "or leave lora_init out"
            )
        start = known.get(path)
        shape = config.at(path)
        if (
            watch is None
            or start is None
            or len(start[0]) != shape.rank
            or watch.config.at(path).scale != shape.scale
        ):
            raise ValueError(
                f"lora_init='loftq': {path} was quantised before, and what that took is not known "
                "any more, or for another rank and alpha; give the model in 16 bits with "
                "quantization='nf4', or load it with load_model(..., quantization='nf4', "
                "watch=LoftQ(config))"
            )


@torch.no_grad()
def start_from_quantisation(model: Any) -> None:
    """Copy the starting values into all adapters and delete them.

    Magnitudes (DoRA) become the norms of the rows with the adapter.
    """
    starts = vars(model).pop(WATCHED).starts
    for path, layer in linear_adapters(model):
        start_a, start_b = starts[path]
        layer.lora_A.copy_(start_a)
        layer.lora_B.copy_(start_b)
        if layer.lora_magnitude_vector is not None:
            layer.lora_magnitude_vector.copy_(layer.norms())
