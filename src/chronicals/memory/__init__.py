"""Policies for activations."""

from chronicals.memory.offload import ActivationOffload
from chronicals.memory.recompute import CHEAP, LAYERS, NOTHING, POLICIES, Estimate, enable_gradient_checkpointing, estimate

__all__ = [
    "CHEAP",
    "LAYERS",
    "NOTHING",
    "POLICIES",
    "ActivationOffload",
    "Estimate",
    "enable_gradient_checkpointing",
    "estimate",
]
