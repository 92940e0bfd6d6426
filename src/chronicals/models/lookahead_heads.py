"""Names and modules of the heads that predict a decoder's expert choices.

They are defined in ``moe/lookahead/heads.py``. Logits do not depend on them. With adapters, the
heads are trained in full and saved together with the adapters.
"""

from __future__ import annotations

from typing import Any

from torch import nn

HEADS = ("layer_ahead", "token_ahead")
"""Attributes of a decoder with such heads; a path with one of these parts belongs to a head."""


def lookahead_heads(model: Any) -> dict[str, nn.Module]:
    """Return the heads of the native mixture-of-experts model by name; empty for other models."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    there = {name: getattr(decoder, name, None) for name in HEADS}
    return {name: module for name, module in there.items() if isinstance(module, nn.Module)}


def is_of_head(name: str) -> bool:
    """Return True if ``name`` is the path of a head, or of a weight in one."""
    return any(part in HEADS for part in name.split("."))
