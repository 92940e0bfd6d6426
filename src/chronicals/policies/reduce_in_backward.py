"""Summing over the ranks and freeing of gradients during the backward pass."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from chronicals.config import ChronicalsConfig, ConfigurationError
from chronicals.policies.exclusions import SHARED_PACKS, why_excluded
from chronicals.policies.facts import DIVIDE_WEIGHTS, Facts
from chronicals.policies.policy import (
    Course,
    Decision,
    MemoryLoad,
    Policy,
    Remedy,
    register_policy,
)
from chronicals.policies.step_time import StepWork


class ReduceInBackward(Policy):
    """Gradients are summed in the backward pass if asked, if not all fit, or if no graphs run."""

    name = "reduce_in_backward"
    title = "gradients summed in the backward pass"
    setting = "memory=['reduce_in_backward']"
    only_time = True

    def why_not(self, facts: Facts) -> str | None:
        """Return that packs are shared, or that no states are divided, if so."""
        if facts.context > 1:
            return (
                "sums wait for processes that wait for heads, with "
                f"context_parallel={facts.context}; leave one out"
            )
        if facts.config.sharding == "none":
            return "every process updates a share, and sharding='none'; leave one out"
        return None

    def decide(self, facts: Facts, course: Course) -> Decision:
        """Decide by the sharding, by what runs beside it, and by the memory that is needed."""
        asked = self.asked(facts.config)
        reason = self.why_not(facts)
        if asked and reason:
            raise ConfigurationError(f"{self.setting}: {reason}")
        if facts.context > 1:
            return Decision(self.name, False, SHARED_PACKS)
        if course.sharding.how == DIVIDE_WEIGHTS:
            return Decision(self.name, False, "weights are divided, and sums with them")
        if not course.sharding.runs:
            return Decision(self.name, False, course.sharding.reason, matters=asked)
        excluded = why_excluded(self.name, course.standing, facts)
        if excluded:
            return Decision(self.name, False, excluded)
        if not asked and not facts.config.card_decides:
            return Decision(self.name, False, "not among memory")
        if not course.frees and facts.config.fit == "auto":
            reason = "fit='auto': processes agree that all have had the memory before they sum"
            return Decision(self.name, False, reason)
        if not course.frees:
            words = "beside its products, for no micro-step is a CUDA graph"
        elif asked:
            words = facts.who_asked(self.name)
        else:
            words = "the gradients of all weights would not fit beside the rest"
        return Decision(self.name, True, words)

    def bytes(self, facts: Facts, load: MemoryLoad) -> MemoryLoad:
        """Return ``load`` with gradients that are freed once they were sent."""
        return replace(load, gradient=0)

    def work(self, facts: Facts, work: StepWork, decision: Decision) -> StepWork:
        """Return ``work`` with fp32 gradients that are sent for each micro-batch, not once."""
        again = work.micro_batches - 1
        return replace(work, sent=work.sent + 4 * again * work.trained)

    def settings(self, facts: Facts) -> Iterator[Remedy]:
        """Yield the entry of ``memory`` where processes share the optimizer's states."""
        shared = facts.ranks > 1 and not facts.divides_weights
        return super().settings(facts) if shared else iter(())

    def spares(self, config: ChronicalsConfig, ranks: int) -> bool:
        """Return whether states are divided and no packs are shared."""
        shared = ranks > 1 and config.sharding == "optimizer" and config.context_parallel == 1
        return shared or self.asked(config)


register_policy(ReduceInBackward())
