"""Policies for activations."""

from chronicals.memory.recompute import CHEAP, LAYERS, NOTHING, POLICIES, Estimate, enable_gradient_checkpointing, estimate

__all__ = ["CHEAP", "LAYERS", "NOTHING", "POLICIES", "Estimate", "enable_gradient_checkpointing", "estimate"]
