"""Sizes of a model that the time of a step depends on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from chronicals.lora import adapters, has_magnitudes
from chronicals.lora.layers import linear_adapters
from chronicals.model_shape import ModelShape
from chronicals.quantization import packed_modules
from chronicals.step_work import PROJECTIONS, DecoderShape


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of a model that its step's work depends on, and that no setting changes.

    Attributes:
        shape: of the decoder.
        scale: weights of the layers over those of the shape. What the shape lacks (shared experts,
            latent attention, other MLPs) is taken to multiply as fast as what it has.
        trained: number of trained values.
        adapted: names of the projections that have adapters.
        packed: True if weights of layers are in a packed format.
        magnitudes: True if adapters have magnitudes (DoRA).
    """

    shape: DecoderShape
    scale: float
    trained: int
    adapted: tuple[str, ...]
    packed: bool
    magnitudes: bool

    @classmethod
    def of(cls, model: Any) -> ModelSizes:
        """Read the sizes of a model with its adapters; it may be on the meta device."""
        shape = DecoderShape.of(model.config)
        adapted = {path.split(".")[-1] for path, _ in adapters(model)}
        multiplied = weights_met(model)[0]
        if model.get_output_embeddings() is not None:
            multiplied -= shape.head
        # products of adapters on linear layers are counted by themselves
        multiplied -= sum(p.numel() for _, layer in linear_adapters(model) for p in layer.pair)
        return cls(
            shape=shape,
            scale=multiplied / max(shape.body, 1),
            trained=sum(p.numel() for p in model.parameters() if p.requires_grad),
            adapted=tuple(name for name in PROJECTIONS if name in adapted),
            packed=any(True for _ in packed_modules(model)),
            magnitudes=has_magnitudes(model),
        )


def weights_met(model: Any) -> tuple[float, float]:
    """Return how many weights a token is multiplied with, and how many of these are trained.

    Those of adapters are among both. Of stacked experts those count that a token is routed to.
    """
    shape = ModelShape.of(model.config)
    each = getattr(model.config.get_text_config(), "num_experts_per_tok", None) or shape.experts
    met = each / max(shape.experts, 1)
    packed = 0.0
    codes = set[int]()
    for _, module in packed_modules(model):
        packed += module.values * (met if module.routed else 1)
        codes |= {id(weight.codes) for weight in module.weights.values()}
    modules = [m for m in model.modules() if not isinstance(m, nn.Embedding)]
    heads = [head for head in (model.get_output_embeddings(),) if head is not None]
    dense = {
        id(p): p
        for m in (*modules, *heads)
        for p in m.parameters(recurse=False)
        if p.ndim > 1 and id(p) not in codes
    }
    sizes = {
        key: p.numel() * (met if p.ndim == 3 and shape.experts else 1) for key, p in dense.items()
    }
    trained = sum(sizes[key] for key, p in dense.items() if p.requires_grad)
    return packed + sum(sizes.values()), trained
