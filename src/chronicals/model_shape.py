"""The sizes of a model, read from its configuration in one place; without torch, for what runs
before it is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Fields of configurations that hold the number of experts."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder; 0 where the configuration has no single one.

    Attributes:
        layers: decoder layers.
        width: of the hidden states.
        heads, kv_heads: of queries; of keys and values.
        head_dim: width of a head.
        inner: width between the products of an MLP; four times the hidden width where the
            configuration does not say.
        vocabulary: rows of the embedding.
        experts: in a layer that has some.
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
        """Of a transformers configuration, or of what its ``config.json`` holds, whose fields
        must then have their usual names; of a model of images and text, that of the text."""
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
            experts=next((number for name in EXPERTS if (number := _number(config, name))), 0),
        )


def _number(config: Any, name: str) -> int:
    try:
        value = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
    except RuntimeError:  # what transformers raises where it is another one in other layers
        return 0
    return value if isinstance(value, int) else 0
