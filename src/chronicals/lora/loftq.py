"""LoftQ: adapters over a base in 4 bits start as what quantising took, as well as their rank can
hold it (Li et al., 2023, arXiv 2310.08659, algorithm 1 with T = 1).

    Q = q(W),   W − Q = U S Vᵀ:   A = √(S/s) Vᵀ,   B = U √(S/s)        of the r largest values, so that Q + s · B A is nearest W

Q is what everybody has who quantises W to NF4, so an adapter is right over that base as it is.
Further alternations (Q = q(W − s · B A)) give another base, in which no file of weights is: they
are not taken.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from chronicals.lora.config import LoRAConfig
from chronicals.lora.layers import linear_adapters
from chronicals.models.four_bits import WATCHED
from chronicals.quantization import PackedWeight, packed_weight


class LoftQ:
    """Starting values, computed while a model is quantised, layer by layer, since W is gone
    afterwards.

    ``load_model(..., watch=...)`` and ``quantise_layers(model, watch)`` call it for each layer, and
    leave it with the model.

    Args:
        config: of the adapters that will be attached; layers that it does not name are passed over.

    Attributes:
        starts: A ``[r, in]`` and B ``[out, r]`` by path, fp32 in host memory.
    """

    def __init__(self, config: LoRAConfig):
        self.config = config
        self.starts: dict[str, tuple[Tensor, Tensor]] = {}

    @torch.no_grad()
    def __call__(self, path: str, weight: Tensor, packed: PackedWeight) -> None:
        """
        Args:
            weight: W, ``[out, in]``.
            packed: what it is quantised to, on the same device.

        Raises:
            ValueError: the rank is larger than the weight.
        """
        shape = self.config.at(path)
        if not self._names(path):
            return
        if shape.rank > min(weight.shape):
            raise ValueError(
                f"lora_init='loftq': the adapter of {path} has rank {shape.rank}, its weight "
                f"{tuple(weight.shape)} only "
                f"{min(weight.shape)}; set lora_rank, or lora_rank_pattern for this layer"
            )
        u, s, vh = torch.linalg.svd(weight.float() - packed.dense().float(), full_matrices=False)
        root = (s[: shape.rank] / shape.scale).sqrt()
        self.starts[path] = (
            (root[:, None] * vh[: shape.rank]).cpu(),
            (u[:, : shape.rank] * root).cpu(),
        )

    def _names(self, path: str) -> bool:
        """Whether the layer may be a target; what is one is decided when adapters are attached."""
        wanted = self.config.target_modules
        if wanted is None or wanted == "all-linear":
            return True
        if isinstance(wanted, str):
            return re.fullmatch(wanted, path) is not None
        return any(f".{path}".endswith(f".{name}") for name in wanted)


def check_quantised(model: Any, paths: Collection[str], config: LoRAConfig) -> None:
    """Raises ValueError where a layer has no start: it is not in 4 bits, or was quantised
    without being watched.
    """
    watch = getattr(model, WATCHED, None)
    known = watch.starts if isinstance(watch, LoftQ) else {}
    for path in paths:
        packed = packed_weight(model.get_submodule(path))
        if packed is None or packed.recipe is None:
            raise ValueError(
                f"lora_init='loftq': the weight of {path} is not in 4 bits, of which it makes up "
                "for the loss; set "
                "quantization='nf4', leave the layer out of lora_target_modules, or leave "
                "lora_init out"
            )
        there = known.get(path)
        (rank, scale) = (config.at(path).rank, config.at(path).scale)
        if (
            watch is None
            or there is None
            or len(there[0]) != rank
            or watch.config.at(path).scale != scale
        ):
            raise ValueError(
                f"lora_init='loftq': {path} was quantised before, and what that took is not known "
                "any more, or for another "
                "rank and alpha; give the model in 16 bits with quantization='nf4', or load it "
                "with "
                "load_model(..., quantization='nf4', watch=LoftQ(config))"
            )


@torch.no_grad()
def start_from_quantisation(model: Any) -> None:
    """Give every adapter its start, and forget the starts; magnitudes (DoRA) become the lengths
    of rows with it.
    """
    starts = vars(model).pop(WATCHED).starts
    for path, layer in linear_adapters(model):
        for own, start in zip((layer.lora_A, layer.lora_B), starts[path], strict=True):
            own.copy_(start)
        if layer.lora_magnitude_vector is not None:
            layer.lora_magnitude_vector.copy_(layer.norms())
