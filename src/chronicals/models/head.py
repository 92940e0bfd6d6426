"""Head: what a causal language model does with its last hidden states, as tensors and numbers.

A loss takes the module, not a raw weight: scale, softcap and bias come with it, and a head that is not understood is
refused by name instead of being computed wrongly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


class UnknownHead(ValueError):
    """The output layer is of a kind that is not understood."""


@dataclass(frozen=True)
class Head:
    """``softcap · tanh(scale · (h Wᵀ + b) / softcap)``.

    Attributes:
        weight: ``[V, D]``, possibly tied to the embedding.
        bias: ``[V]`` or None.
        scale: factor on the logits.
        softcap: bound of the logits, or None.
    """

    weight: Tensor
    bias: Tensor | None
    scale: float
    softcap: float | None


SCALES = {
    "logit_scale": lambda factor: factor,  # Cohere
    "logits_scaling": lambda divisor: 1.0 / divisor,  # Granite
    "lm_head_multiplier": lambda factor: factor,  # Falcon-H1
}
"""Configuration fields that multiply the logits, and the factor they stand for."""


def read_head(model: Any) -> Head:
    """The head of a transformers causal language model.

    Raises:
        UnknownHead: there is no output embedding, or it is not a plain linear layer.
    """
    layer = model.get_output_embeddings()
    name = type(layer).__name__
    if type(layer) is not nn.Linear:
        raise UnknownHead(f"the output layer of {type(model).__name__} is {name}, not a plain torch.nn.Linear")
    config = model.config.get_text_config()
    scale = 1.0
    for field, factor in SCALES.items():
        value = getattr(config, field, None)
        if value is not None:
            scale *= factor(value)
    return Head(layer.weight, layer.bias, scale, getattr(config, "final_logit_softcapping", None))
