"""Rows of logits that exist at a time in the loss (``logits_chunk_size``)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from chronicals.config import ChronicalsConfig
from chronicals.policies.facts import Facts
from chronicals.policies.policy import (
    Course,
    Decision,
    Policy,
    Remedy,
    Running,
    register_policy,
)
from chronicals.policies.step_time import GRADIENT_BYTES, StepWork

LEAN_LOGIT_ROWS = 1024
"""Rows of logits at a time, which need a quarter of the default's memory."""


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
        """Return ``work`` with products of the head for a chunk, and its gradient's sums over them.

        Those of its own gradient are slowed by nothing but the sums.
        """
        job = work.job
        rows = facts.config.logits_chunk_size
        head = []
        for each in work.head:
            chunk = each.product
            if chunk.kind != "dW":
                chunk = replace(chunk, rows=min(rows, chunk.rows))
            times = each.times * each.product.rows / chunk.rows
            head.append(replace(each, product=chunk, times=times))
        work = replace(work, head=tuple(head))
        if job.rank:  # beside adapters the head is frozen
            return work
        chunks = -(-job.tokens // rows)
        return replace(work, loss=work.loss + chunks * GRADIENT_BYTES * job.shape.head)

    def settings(self, facts: Facts) -> Iterator[Remedy]:
        """Yield fewer rows, if their number was not set and a batch has as many."""
        config = facts.config
        rows = min(config.logits_chunk_size, facts.tokens)
        if self.name not in config.explicit and facts.head_is_read and rows > LEAN_LOGIT_ROWS:
            yield from self.remedies(config, facts.ranks)

    def remedies(self, config: ChronicalsConfig, ranks: int) -> Iterator[Remedy]:
        """Yield fewer rows, if there are more."""
        if config.logits_chunk_size > LEAN_LOGIT_ROWS:
            yield Remedy({self.name: LEAN_LOGIT_ROWS})

    def addition(self, running: Running) -> Decision | None:
        """Return fewer rows, if the objective has more."""
        if running.objective.chunk_size <= LEAN_LOGIT_ROWS:
            return None
        return Decision(self.name, True, f"{self.name} becomes {LEAN_LOGIT_ROWS}")

    def join(self, running: Running, decision: Decision) -> None:
        """Let the objective's loss have fewer rows at a time."""
        running.objective.chunk_size = LEAN_LOGIT_ROWS


register_policy(LogitRows())
