"""Steps captured once and replayed as CUDA graphs."""

from __future__ import annotations

from dataclasses import replace

import torch.distributed as dist

from chronicals.attention import FLASH
from chronicals.models import unfused_kind
from chronicals.policies.exclusions import conditions, why_excluded
from chronicals.policies.facts import ONE_BY_ONE, Facts
from chronicals.policies.policy import (
    GRAPHED_WORKSPACES,
    Decision,
    MemoryLoad,
    Switch,
    register_policy,
)
from chronicals.policies.step_time import StepWork


class CudaGraphs(Switch):
    """Micro-steps as CUDA graphs, and the update too for one process (``training.step.graphs``)."""

    name = "use_cuda_graphs"
    title = "CUDA graphs"
    runs_as = "micro-step and update are replayed"

    def why_not(self, facts: Facts) -> str | None:
        """Return what would ask the host within a step; None if nothing does."""
        by_gloo = facts.divides_weights and dist.is_initialized() and dist.get_backend() != "nccl"
        if not facts.on_card:
            return "not on a card"
        if by_gloo:
            return "weights are gathered for each layer by gloo, which works on the host"
        if not facts.packed:
            return "documents become padded rows"
        if facts.one_by_one:
            return ONE_BY_ONE
        if not facts.head_is_read:
            return "the model's own logits are used"
        if facts.backend and facts.backend not in FLASH:  # a plan has none, and takes Flash
            return f"attention by {facts.backend} asks the host"
        if facts.config.mixed_precision == "fp16":
            return "fp16 runs under autocast"
        if unfused_kind(facts.model) is not None:
            return "adapters run through PEFT's own modules, which may ask the host"
        return None

    def bytes(self, facts: Facts, load: MemoryLoad) -> MemoryLoad:
        """Return ``load`` with gradients that stay allocated, since several graphs write to them.

        One graph alone makes them while it frees activations, in the same memory.
        """
        if facts.on_host:
            return load
        pooled = not facts.alike and self._run(facts)
        load = replace(load, workspaces=GRAPHED_WORKSPACES, pooled=pooled)
        return load if facts.alike else replace(load, gradients_stay=True)

    def _run(self, facts: Facts) -> bool:
        """Return whether graphs run, by what is known before other policies are decided."""
        standing = conditions(facts) | facts.config.memory_policies
        return why_excluded(self.name, standing, facts) is None and self.why_not(facts) is None

    def work(self, facts: Facts, work: StepWork, decision: Decision) -> StepWork:
        """Return ``work`` without waiting for the host, where graphs can run."""
        return replace(work, replayed=self.why_not(facts) is None)


register_policy(CudaGraphs())
