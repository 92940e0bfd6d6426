"""Steps captured once and replayed as CUDA graphs."""

from __future__ import annotations

from dataclasses import replace

import torch.distributed as dist

from chronicals.attention import FLASH
from chronicals.memory import RESERVE
from chronicals.models import unfused_kind
from chronicals.policies.exclusions import conditions, why_excluded
from chronicals.policies.facts import ONE_BY_ONE, Facts
from chronicals.policies.needed_memory import GIB
from chronicals.policies.policy import (
    GRAPHED_WORKSPACES,
    Course,
    Decision,
    Fitted,
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
    before_memory = False

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

    def decide(self, facts: Facts, course: Course) -> Decision:
        """Decide whether graphs run: if steps allow it, and there is room for their memory pool.

        Raises:
            ConfigurationError: the field was set, and steps do not allow it.
        """
        decision = super().decide(facts, course)
        assert course.fitted is not None, "graphs are decided after the memory"
        if decision.runs and self.has_no_room(facts, course.fitted):
            pool = course.fitted.pool / GIB
            reason = f"no room for the {pool:.1f} GiB of their memory pool beside a step's"
            if course.fitted.memory.without_graphs:
                reason = "no room for gradients that stay between their steps"
            return Decision(self.name, False, reason, matters=self.matters)
        return decision

    def has_no_room(self, facts: Facts, fitted: Fitted) -> bool:
        """Return whether the pool does not fit beside the step, and nobody asked for graphs.

        Where not even gradients that stay for them would fit, the memory is that of steps without.
        """
        if fitted.memory.without_graphs:
            return True
        total = fitted.memory.total
        full = fitted.held + fitted.pool > RESERVE * total
        return bool(total) and full and self.name not in facts.config.explicit

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


CUDA_GRAPHS = register_policy(CudaGraphs())
