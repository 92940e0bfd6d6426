"""Recomputing activations in the backward pass instead of keeping them (Chen et al., 2016, section 4)."""

from __future__ import annotations

from typing import Any

import torch

RESERVE = 0.9
"""Share of the card that may be planned for; the rest is fragmentation and workspaces."""


def enable_gradient_checkpointing(model: Any) -> None:
    """Recompute every decoder layer of a Hugging Face model in the backward pass.

    Raises:
        ValueError: the class does not support it.
    """
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise ValueError(f"use_gradient_checkpointing: {type(model).__name__} cannot recompute its layers; turn it off")
    shares = [getattr(module, name, 0.0) for module in model.modules() for name in ("p", "dropout", "attention_dropout")]
    drops = any(isinstance(share, float) and share > 0 for share in shares)
    options = {"use_reentrant": False, "preserve_rng_state": drops}  # a random state cannot be read while a graph is captured
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)


def needs_recomputation(model: Any, tokens: int) -> tuple[bool, str]:
    """Whether a forward pass over ``tokens`` would overfill the card, and the estimate in words.

    The estimate of saved activations, ``2 · (30 D + 5 F)`` bytes a token and layer, is that of an unfused transformer
    layer of width D with an MLP of width F.
    """
    device = next(model.parameters()).device
    if device.type != "cuda":
        return False, "not on a card"
    config = model.config.get_text_config()
    width, layers = config.hidden_size, config.num_hidden_layers
    inner = getattr(config, "intermediate_size", None) or 4 * width
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    states = trained * (4 + 8 + 2)
    activations = tokens * layers * 2 * (30 * width + 5 * inner)
    total = torch.cuda.get_device_properties(device).total_memory
    estimate = weights + states + activations
    words = f"estimated {estimate / 2**30:.1f} of {total / 2**30:.1f} GiB"
    return estimate > RESERVE * total, words
