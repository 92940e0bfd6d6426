"""Sizes of a model, read from its configuration in one place.

It does not import torch, because it is used before torch is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

EXPERT_FIELDS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Fields of configurations that hold the number of experts."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder.

    A size that the configuration does not have, or that differs between layers, is 0.

    Attributes:
        layers: number of decoder layers.
        width: width of the hidden states.
        heads: number of query heads.
        kv_heads: number of key-value heads.
        head_dim: width of a head.
        inner: width of the hidden activations of an MLP; by default four times ``width``.
        vocabulary: rows of the embedding.
        experts: experts of a layer that has some.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocabulary: int
    experts: int

    @classmethod
    def of(cls, config: Any) -> ModelShape:
        """Read the sizes of a transformers configuration or of the content of a ``config.json``.

        The fields must have their usual names. For a model of images and text these are the sizes
        of its text model.
        """
        config = (
            config.get("text_config") or config
            if isinstance(config, Mapping)
            else config.get_text_config()
        )
        width = _number(config, "hidden_size")
        heads = _number(config, "num_attention_heads")
        return cls(
            layers=_number(config, "num_hidden_layers"),
            width=width,
            heads=heads,
            kv_heads=_number(config, "num_key_value_heads") or heads,
            head_dim=_number(config, "head_dim") or (width // heads if heads else 0),
            inner=_number(config, "intermediate_size") or 4 * width,
            vocabulary=_number(config, "vocab_size"),
            experts=next(filter(None, (_number(config, name) for name in EXPERT_FIELDS)), 0),
        )


def _number(config: Any, name: str) -> int:
    try:
        value = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
    except RuntimeError:  # raised by transformers if layers differ in it
        return 0
    return value if isinstance(value, int) else 0
