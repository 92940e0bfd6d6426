"""Policies for activations."""

from chronicals.memory.recompute import enable_gradient_checkpointing, needs_recomputation

__all__ = ["enable_gradient_checkpointing", "needs_recomputation"]
