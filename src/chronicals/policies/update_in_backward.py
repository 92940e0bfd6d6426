"""Weight updates during the backward pass, each as soon as its gradient exists."""

from __future__ import annotations

from dataclasses import replace

from chronicals.policies.facts import Facts
from chronicals.policies.policy import MemoryLoad, Policy, register_policy


class UpdateInBackward(Policy):
    """Gradients are applied and freed during the backward pass (``training.step.in_backward``)."""

    name = "optimizer_in_backward"
    title = "optimizer in the backward pass"
    runs_as = "gradients are dropped once used"
    setting = "memory=['optimizer_in_backward']"
    only_time = True

    def bytes(self, facts: Facts, load: MemoryLoad) -> MemoryLoad:
        """Return ``load`` without gradients, which are freed once they were used."""
        return replace(load, gradient=0)


register_policy(UpdateInBackward())
