"""Frozen input embedding and head in host memory."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from chronicals.kernels.host_memory import available_memory
from chronicals.models.host_tables import (
    head_in_host,
    host_tables,
    tables_in_host_memory,
    why_embedding_stays,
)
from chronicals.objectives import OBJECTIVES
from chronicals.policies.facts import Facts
from chronicals.policies.policy import Decision, MemoryLoad, Policy, register_policy
from chronicals.policies.step_time import StepWork


class OffloadEmbeddings(Policy):
    """The card reads the rows of a batch's tokens; the head is there while the loss is computed."""

    name = "offload_embeddings"
    title = "embeddings in host memory"
    setting = "memory=['offload_embeddings']"
    only_time = True

    def why_not(self, facts: Facts) -> str | None:
        """Return why they cannot be in host memory: not frozen or plain, no card, or no room."""
        if not facts.on_card:
            return "weights are in host memory anyway; leave it out"
        reason = why_embedding_stays(facts.model)
        if reason:
            return f"{reason}; leave it out"
        if OBJECTIVES[facts.config.objective].draws_answers:
            return (
                f"objective={facts.config.objective!r} draws answers between steps, where graphs "
                "read the head at one place; leave it out"
            )
        size = _bytes(facts)
        available = None if facts.planned else available_memory()
        if available is None or size <= available:
            return None
        return (
            f"tables of {size / 2**30:.2f} GiB, and {available / 2**30:.2f} GiB of host memory are "
            "free; leave it out"
        )

    def words(self, facts: Facts) -> str:
        """Return who asked for it, what moves, and its bytes."""
        what = "embedding alone, for the head is trained or not plain"
        if head_in_host(facts.model) is not None:
            what = "embedding, and head but for the loss"
        size = _bytes(facts) / 2**30
        return f"{facts.who_asked(self.name)}, {what}; {size:.2f} GiB"

    def bytes(self, facts: Facts, load: MemoryLoad) -> MemoryLoad:
        """Return ``load`` with the tables in host memory, and the head's copy at the loss."""
        size = _bytes(facts)
        return replace(
            load,
            moved=load.moved + size,
            head_copy=_head_bytes(facts),
            host={**load.host, self.title: size},
        )

    def work(self, facts: Facts, work: StepWork, decision: Decision) -> StepWork:
        """Return ``work`` with the copy of the head and the rows of each micro-batch."""
        rows = facts.tokens * work.job.shape.width * facts.element
        return replace(work, fetched=work.fetched + _head_bytes(facts) + rows)

    def around_steps(self, model: Any, decision: Decision) -> AbstractContextManager[Any]:
        """Return the context in which both are in host memory."""
        return tables_in_host_memory(model)


def _bytes(facts: Facts) -> int:
    """Return the bytes of the tables that move."""
    return sum(table.numel() for table in host_tables(facts.model)) * facts.element


def _head_bytes(facts: Facts) -> int:
    """Return the bytes of a head that moves; 0 if it stays."""
    head = head_in_host(facts.model)
    return 0 if head is None else head.weight.numel() * facts.element


register_policy(OffloadEmbeddings())
