"""Packs of a forward pass, while an optimizer step has the same packs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from chronicals.config import ChronicalsConfig
from chronicals.policies.facts import Facts
from chronicals.policies.policy import Course, Decision, Policy, Remedy, register_policy
from chronicals.policies.step_time import GRADIENT_BYTES, StepWork

FULL_TOKENS = 8192
"""Tokens of a forward pass from which more are hardly faster.

A product of 8192 rows and 2048 columns has 512 tiles of 128 x 256, nearly four for each of the 132
multiprocessors of an H100 or H200.
"""


class MicroBatches(Policy):
    """``batch_size`` packs are computed at a time, and gradients of several times are summed."""

    name = "micro_batches"
    title = ""  # the length of a run says it

    def asked(self, config: ChronicalsConfig) -> bool:
        """Return whether a step has several forward passes."""
        return config.gradient_accumulation_steps > 1

    def decide(self, facts: Facts, course: Course) -> Decision:
        """Return how the packs of a step are divided."""
        config = facts.config
        words = f"{config.gradient_accumulation_steps} a step, of {config.batch_size} packs"
        return Decision(self.name, self.asked(config), words)

    def work(self, facts: Facts, work: StepWork, decision: Decision) -> StepWork:
        """Return ``work`` with the sums of gradients over the micro-batches."""
        backward = work.backward
        shares = facts.sharing if facts.divides_weights else 1
        summed = backward.moved + GRADIENT_BYTES * work.trained / shares
        return replace(work, backward=replace(backward, moved=summed))

    def settings(self, facts: Facts) -> Iterator[Remedy]:
        """Yield other divisions of a step's packs, if none was set: smaller, or large enough.

        A run that goes on from a checkpoint may have had no memory for larger ones.
        """
        config = facts.config
        if config.explicit & {"batch_size", "gradient_accumulation_steps"}:
            return
        packs = config.batch_size * config.gradient_accumulation_steps
        for size in range(packs, 0, -1):
            tokens = facts.tokens * size // config.batch_size
            if packs % size or size == config.batch_size:
                continue
            larger = tokens <= FULL_TOKENS and not facts.resumed
            if size < config.batch_size or larger:
                count = packs // size
                yield Remedy({"batch_size": size, "gradient_accumulation_steps": count})

    def remedies(self, config: ChronicalsConfig, ranks: int) -> Iterator[Remedy]:
        """Yield half of the packs at a time, in twice as many micro-batches if there may be more."""
        if config.batch_size == 1:
            return
        batch = config.batch_size // 2
        if "optimizer_in_backward" in config.memory_policies:
            yield Remedy({"batch_size": batch}, "fewer tokens a step")
            return
        count = 2 * config.gradient_accumulation_steps
        yield Remedy({"batch_size": batch, "gradient_accumulation_steps": count})


register_policy(MicroBatches())
