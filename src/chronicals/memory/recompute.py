"""Activations made again in the backward pass instead of kept (Chen et al., 2016, section 4), where memory needs it."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

RESERVE = 0.9
"""Share of the card that may be planned for; the rest is fragmentation and workspaces."""

NOTHING, CHEAP, LAYERS = "nothing", "norms and gated units", "layers"
POLICIES = (NOTHING, CHEAP, LAYERS)
"""What is made again, from the fastest to the leanest. The second is for fused layers, and costs no product."""


@dataclass(frozen=True)
class Estimate:
    """Bytes that a training run is expected to hold.

    Attributes:
        fixed: weights, gradients and optimizer states.
        activations: by policy.
        total: of the card; 0 without one.
    """

    fixed: int
    activations: Mapping[str, int]
    total: int

    def policy(self) -> str:
        """The fastest that fits; the leanest if none does."""
        fits = (name for name, kept in self.activations.items() if self.fixed + kept <= RESERVE * self.total)
        return NOTHING if not self.total else next(fits, LAYERS)

    def words(self) -> str:
        if not self.total:
            return "not on a card"
        needed = (self.fixed + self.activations[self.policy()]) / 2**30
        return f"estimated {needed:.1f} of {self.total / 2**30:.1f} GiB, {self.policy()} made again"


def estimate(model: Any, tokens: int, fused: bool, size: int, frozen: int, trained: int, chunk: int) -> Estimate:
    """What training ``model`` holds.

    Args:
        tokens: of one forward pass.
        fused: whether decoder layers run fused; else activations are those of an unfused layer of width D with an MLP of
            width F, ``30 D + 5 F`` elements a token and layer.
        size: bytes of an element of the activations.
        frozen, trained: bytes of a weight of either kind, gradient and optimizer states included.
        chunk: rows of logits that exist at a time.
    """
    parameters = list(model.parameters())
    device = parameters[0].device
    fixed = sum(p.numel() * (trained if p.requires_grad else frozen) for p in parameters)
    shape = model.config.get_text_config()
    layers, width = shape.num_hidden_layers, shape.hidden_size
    inner = getattr(shape, "intermediate_size", None) or 4 * width
    heads = getattr(shape, "num_attention_heads", 1)
    head = getattr(shape, "head_dim", None) or width // heads
    attended = head * (2 * heads + 2 * (getattr(shape, "num_key_value_heads", None) or heads))
    whole = size * (4 * width + attended + 3 * inner) if fused else size * (30 * width + 5 * inner)
    kept = {NOTHING: layers * whole}
    if fused:
        kept[CHEAP] = layers * size * (2 * width + attended + 2 * inner)
    kept[LAYERS] = layers * size * width + whole
    total = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0
    head = getattr(model.get_output_embeddings(), "base_layer", model.get_output_embeddings()).weight
    loss = head.numel() * 4 * head.requires_grad + min(chunk, tokens) * len(head) * size
    return Estimate(fixed, {name: tokens * needed + loss for name, needed in kept.items()}, total)


def enable_gradient_checkpointing(model: Any, whole_layers: bool = False) -> None:
    """Recompute every decoder layer of a Hugging Face model in the backward pass.

    Args:
        whole_layers: its layers run fused, and leave out, the second time, what nobody reads then.

    Raises:
        ValueError: the class does not support it.
    """
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise ValueError(f"use_gradient_checkpointing: {type(model).__name__} cannot recompute its layers; turn it off")
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": draws_numbers(model)}  # reading a state takes time
    if whole_layers:
        options["context_fn"] = first_and_again
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)


_now = threading.local()


def runs_again() -> bool:
    """Whether what runs now is run for the tensors that its backward pass reads: what comes out last is not among them."""
    return getattr(_now, "again", False)


def first_and_again() -> tuple[AbstractContextManager, AbstractContextManager]:
    """``context_fn`` of a checkpoint within which ``runs_again`` tells the truth."""
    return _Running(False), _Running(True)


class _Running:
    """Entered once more for every backward pass."""

    def __init__(self, again: bool):
        self.again = again
        self.before: list[bool] = []

    def __enter__(self) -> None:
        self.before.append(runs_again())
        _now.again = self.again

    def __exit__(self, *_: object) -> None:
        _now.again = self.before.pop()


def draws_numbers(module: torch.nn.Module) -> bool:
    """Whether a forward pass draws random numbers, for dropout."""
    shares = [getattr(part, name, 0.0) for part in module.modules() for name in ("p", "dropout", "attention_dropout")]
    return any(isinstance(share, float) and share > 0 for share in shares)
