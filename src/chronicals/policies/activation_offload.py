"""Offloading of activations to host memory until the backward pass."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from chronicals.config import ChronicalsConfig
from chronicals.memory import ActivationOffload
from chronicals.policies.facts import DIVIDE_WEIGHTS, Facts
from chronicals.policies.policy import (
    Decision,
    MemoryLoad,
    Policy,
    Running,
    register_policy,
)
from chronicals.policies.step_time import StepWork


class OffloadActivations(Policy):
    """Saved tensors are copied to host memory and back, overlapping with computation."""

    name = "activation_offload"
    title = "activation offload"
    runs_as = "beside the computation"
    setting = "activation_offload=True cannot be honoured here, nor memory=['offload_activations']"
    only_time = True

    def why_not(self, facts: Facts) -> str | None:
        """Return that the activations are in host memory anyway, without a card."""
        if facts.on_card:
            return None
        return "activations are in host memory anyway; leave it out"

    def bytes(self, facts: Facts, load: MemoryLoad) -> MemoryLoad:
        """Return ``load`` with only a window of the activations on the GPU."""
        return replace(load, step=replace(load.step, offloads=True))

    def work(self, facts: Facts, work: StepWork, decision: Decision) -> StepWork:
        """Return ``work`` with the copies of all that a forward pass keeps."""
        return replace(work, offloaded=work.offloaded + work.kept)

    def around_steps(self, model: Any) -> AbstractContextManager[Any]:
        """Return the context that moves saved tensors of the decoder."""
        return ActivationOffload(model.get_decoder())

    def addition(self, running: Running) -> Decision | None:
        """Return the offload, if nothing was set about it and it can run beside what runs."""
        config = running.facts.config
        if config.memory is not None or self.name in config.explicit:
            return None
        if running.decisions[self.name].runs or running.why_excluded(self.name):
            return None
        if self.why_not(running.facts):
            return None
        return Decision(self.name, True, "activations are offloaded to the host")

    def spares(self, config: ChronicalsConfig, ranks: int) -> bool:
        """Return False for trained weights that are divided, with which it does not run."""
        return ranks == 1 or config.sharding != DIVIDE_WEIGHTS or config.use_lora


register_policy(OffloadActivations())
