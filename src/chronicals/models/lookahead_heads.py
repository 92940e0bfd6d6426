"""Heads of a decoder that predict which experts will be chosen (``moe/lookahead/heads.py``): their names,
and where they are.

Logits do not depend on them. Beside adapters they are trained whole, and saved with these.
"""

from __future__ import annotations

from typing import Any

from torch import nn

HEADS = ("layer_ahead", "token_ahead")
"""Attributes of a decoder with such heads, and so the last parts of their paths."""


def lookahead_heads(model: Any) -> dict[str, nn.Module]:
    """By these names, the heads of the native mixture; none of any other model."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    there = {name: getattr(decoder, name, None) for name in HEADS}
    return {name: module for name, module in there.items() if isinstance(module, nn.Module)}


def is_of_head(name: str) -> bool:
    """Whether a path is that of a head, or of a weight of one."""
    return any(part in HEADS for part in name.split("."))
