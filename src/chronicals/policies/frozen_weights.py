"""Offloading to host memory of frozen weights that have FP8 copies."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from chronicals.cards import FP8
from chronicals.config import ConfigurationError
from chronicals.memory import decoder_layers
from chronicals.patching import offload_frozen_experts, offload_frozen_weights
from chronicals.policies.facts import Facts, trains_layers
from chronicals.policies.policy import Decision, MemoryLoad, Policy, Remedy, Stage, register_policy
from chronicals.policies.step_time import StepWork
from chronicals.quantization import FP8InHost

logger = logging.getLogger(__name__)


class OffloadFrozenWeights(Policy):
    """Only the FP8 copies of frozen weights stay on the GPU."""

    name = "offload_frozen_weights"
    title = "frozen weights in host memory"
    runs_as = "of products in FP8"
    setting = "memory=['offload_frozen_weights']"
    only_time = True
    stage = Stage.WEIGHTS

    def bytes(self, facts: Facts, load: MemoryLoad) -> MemoryLoad:
        """Return ``load`` without the 16-bit weights that have FP8 copies, which host memory has."""
        values = 0
        for layer in decoder_layers(facts.model):
            matrices = [p for p in layer.parameters() if p.ndim > 1 and not p.requires_grad]
            values += sum(p.numel() for p in matrices)
        host = {**load.host, self.title: values * load.step.element}
        return replace(load, frozen=FP8InHost.bytes_a_value(load.step.element), host=host)

    def work(self, facts: Facts, work: StepWork, decision: Decision) -> StepWork:
        """Return ``work`` with the transposing of FP8 copies, a byte read and one written."""
        values = 0.0
        for each in work.forward.products:
            if each.form == FP8:
                values += each.times * each.product.inputs * each.product.outputs
        backward = replace(work.backward, moved=work.backward.moved + 2 * values)
        return replace(work, backward=backward)

    def settings(self, facts: Facts) -> Iterator[Remedy]:
        """Yield the entry of ``memory`` where weights of products in FP8 are frozen."""
        frozen = facts.config.use_fp8 and not trains_layers(facts.model)
        return super().settings(facts) if frozen else iter(())

    def apply(self, model: Any, facts: Facts, decision: Decision) -> None:
        """Move the weights.

        Raises:
            ConfigurationError: no product in FP8 has a frozen weight.
        """
        moved = offload_frozen_weights(model) + offload_frozen_experts(model)
        if not moved:
            raise ConfigurationError(
                f"{self.setting}: every weight that runs in FP8 is trained; leave it out"
            )
        logger.info("offload_frozen_weights: %.1f GiB wait in host memory", moved / 2**30)


register_policy(OffloadFrozenWeights())
