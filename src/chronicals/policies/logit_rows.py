"""Rows of logits that exist at a time in the loss (``logits_chunk_size``)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from chronicals.config import ChronicalsConfig
from chronicals.model_shape import ModelShape
from chronicals.policies.facts import PRODUCT_TYPES, Facts
from chronicals.policies.needed_memory import LEAN_LOGIT_ROWS
from chronicals.policies.policy import Course, Decision, Policy, Remedy, register_policy
from chronicals.policies.step_work import GRADIENT_BYTES, StepWork

HEAD_READS = 3
"""Times that a chunk reads the head: for its logits, their gradient's product, and its gradient."""


class LogitRows(Policy):
    """The loss computes a chunk of rows after the other, each with the whole head."""

    name = "logits_chunk_size"
    title = ""  # of the loss without whole logits

    def asked(self, config: ChronicalsConfig) -> bool:
        """Return True: the loss always has chunks."""
        return True

    def decide(self, facts: Facts, course: Course) -> Decision:
        """Return the rows of a chunk."""
        return Decision(self.name, True, f"{facts.config.logits_chunk_size} rows at a time")

    def work(self, facts: Facts, work: StepWork, decision: Decision) -> StepWork:
        """Return ``work`` with the bytes of the head, which every chunk reads."""
        config = facts.config
        shape = ModelShape.of(facts.model.config)
        chunks = -(-facts.tokens // config.logits_chunk_size)
        head = facts.model.get_output_embeddings()
        trained = any(p.requires_grad for p in head.parameters())
        each = HEAD_READS * PRODUCT_TYPES[config.mixed_precision].itemsize
        each += GRADIENT_BYTES * trained
        size = shape.width * shape.vocabulary * each
        return replace(work, moved=work.moved + work.micro_batches * chunks * size)

    def settings(self, facts: Facts) -> Iterator[Remedy]:
        """Yield fewer rows, if their number was not set and a batch has as many."""
        config = facts.config
        rows = min(config.logits_chunk_size, facts.tokens)
        if self.name not in config.explicit and facts.head_is_read and rows > LEAN_LOGIT_ROWS:
            yield Remedy({self.name: LEAN_LOGIT_ROWS})


register_policy(LogitRows())
