"""Offloading of activations to host memory until the backward pass."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from chronicals.config import ChronicalsConfig
from chronicals.memory import ActivationOffload
from chronicals.policies.facts import WEIGHTS, Facts
from chronicals.policies.policy import Load, Policy, register


class OffloadActivations(Policy):
    """Saved tensors are copied to host memory and back, overlapping with computation."""

    name = "activation_offload"
    title = "activation offload"
    setting = "activation_offload=True cannot be honoured here, nor memory=['offload_activations']"
    only_time = True

    def asked(self, config: ChronicalsConfig) -> bool:
        return "offload_activations" in config.memory_policies

    def why_not(self, facts: Facts) -> str | None:
        if facts.on_card:
            return None
        return "activations are in host memory anyway; leave it out"

    def words(self, facts: Facts) -> str:
        return "as asked, beside the computation"

    def bytes(self, facts: Facts, load: Load) -> Load:
        """Return ``load`` with only a window of the activations on the GPU."""
        return replace(load, step=replace(load.step, offloads=True))

    def around_steps(self, model: Any) -> AbstractContextManager[Any]:
        return ActivationOffload(model.get_decoder())

    def spares(self, config: ChronicalsConfig, ranks: int) -> bool:
        return ranks == 1 or config.sharding != WEIGHTS or config.use_lora


register(OffloadActivations())
