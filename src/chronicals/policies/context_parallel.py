"""Packs shared by several processes (``context_parallel``); long documents are split among them.

``prove_context`` checks that a model computes the same hidden states for parts of a document as for
the whole.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from chronicals.attention import why_not_divided
from chronicals.batch import IGNORED, Batch
from chronicals.config import ChronicalsConfig, ConfigurationError
from chronicals.data import TokenStore
from chronicals.data.packs.dealing import NOBODY, part_of, rank_share
from chronicals.data.packs.strategies import SPLIT
from chronicals.distributed import WAITING, Mesh
from chronicals.model_shape import ModelShape
from chronicals.models import (
    PresentedModel,
    embedding_table,
    in_evaluation,
    why_neighbours_matter,
)
from chronicals.objectives import Objective
from chronicals.policies.facts import Facts
from chronicals.policies.policy import Course, Decision, MemoryLoad, Policy, register_policy

logger = logging.getLogger(__name__)

PROOF_TOKENS = 32
"""Tokens of each rank's part of the split document."""

LEAST_DEVIATION = 0.02
"""Relative deviation of a token's hidden state that is always allowed."""

NOISE_FACTOR = 5.0
"""Allowed multiple of the model's own numerical noise.

The noise is measured by the deviation after reordering the documents.
"""


class ContextParallel(Policy):
    """Several processes share each pack: whole documents, and parts of those too long for one."""

    name = "context_parallel"
    title = ""  # sharing_packs writes a log line of its own
    before_memory = True

    def asked(self, config: ChronicalsConfig) -> bool:
        """Return whether several processes share a pack."""
        return config.context_parallel > 1

    def why_not(self, facts: Facts) -> str | None:
        """Return why the model's documents cannot be split over processes; None if they can."""
        model = facts.model
        name = type(model).__name__
        if not facts.packed:
            return f"{name} takes documents as padded rows"
        if facts.one_by_one:
            return f"{name} attends to one document after the other"
        if facts.skips_layers:
            return f"{name} skips layers at random, each process others"
        if facts.records_routers:
            return f"the router loss of {name} is one of whole packs"
        neighbours = why_neighbours_matter(model.config, facts.config.max_seq_length)
        if neighbours:
            return neighbours
        shape = ModelShape.of(model.config)
        undivided = why_not_divided(shape.heads, shape.kv_heads, facts.exchanging)
        return undivided and f"{undivided}; context_heads=1 divides none"

    def decide(self, facts: Facts, course: Course) -> Decision:
        """Decide by the number of processes that share a pack, once the model is checked."""
        self.check(facts)
        if facts.context == 1:
            return Decision(self.name, False, "not asked for")
        return Decision(self.name, True, "as asked")

    def check(self, facts: Facts) -> None:
        """Check that the model can take shared packs, if they are configured.

        Raises:
            ConfigurationError: it cannot.
        """
        reason = self.why_not(facts) if facts.context > 1 else None
        if reason:
            raise ConfigurationError(
                f"context_parallel={facts.context}: {reason}; leave it out (or set it to 1)"
            )

    def bytes(self, facts: Facts, load: MemoryLoad) -> MemoryLoad:
        """Return ``load`` with a process's part of the tokens of a forward pass."""
        return replace(load, step=replace(load.step, tokens=load.step.tokens // facts.context))


CONTEXT_PARALLEL = register_policy(ContextParallel())


def check_frozen_context(facts: Facts, frozen: Iterable[PresentedModel]) -> None:
    """Check that the objective's frozen models can take shared packs, if they are configured.

    Raises:
        ConfigurationError: one cannot.
    """
    for presented in frozen:
        other = replace(
            facts,
            model=presented.model,
            packed=presented.packed,
            one_by_one=presented.one_by_one,
            records_routers=presented.records_routers,
        )
        CONTEXT_PARALLEL.check(other)


def sharing_packs(ranks: Mesh, config: ChronicalsConfig, model: Any) -> Mesh:
    """Return the mesh with ``context_parallel`` ranks sharing each pack; all ranks must call it.

    Logs how they attend to split documents.

    Raises:
        ConfigurationError: the ranks or heads cannot be divided so.
    """
    number = config.context_parallel
    asked = config.context_heads
    if number == 1 and asked is not None:
        raise ConfigurationError(
            f"context_heads={asked}: no pack is shared; set context_parallel too, or leave it out"
        )
    if number == 1 or ranks.count % number:
        return ranks.sharing_packs(number)
    shape = ModelShape.of(model.config)
    machines = ranks.gather_values(socket.gethostname())
    inner = asked or exchanging(machines, number, shape.heads, shape.kv_heads)
    if ranks.writer:
        means = []
        if inner > 1:
            among = "all" if inner == number else f"{inner} neighbours"
            means.append(f"{among} exchange heads (all-to-all)")
        if inner < number:
            means.append(f"keys and values of {number // inner} are gathered")
        found = f"{len(set(machines))} machine(s), {shape.kv_heads} key heads"
        logger.info(
            "context_parallel=%d: to attend to split documents %s (%s)",
            number,
            ", and ".join(means),
            "as asked" if asked else found,
        )
    return ranks.sharing_packs(number, inner)


def exchanging(machines: Sequence[str], number: int, heads: int, key_heads: int) -> int:
    """Return the largest number of neighbouring ranks that can exchange heads.

    They share a pack and a machine, and their number divides query and key heads.

    Args:
        machines: name of the machine of each rank.
        number: ranks that share a pack.
        heads: query heads of the model.
        key_heads: key heads of the model.
    """
    for inner in range(number, 1, -1):
        divides = not (number % inner or heads % inner or key_heads % inner)
        if divides and all(
            len({*machines[first : first + inner]}) == 1 for first in range(0, len(machines), inner)
        ):
            return inner
    return 1


def check_dealt(store: TokenStore, objective: Objective, config: ChronicalsConfig) -> None:
    """Check that documents which the objective compares as a whole fit in a part of a pack.

    Otherwise log how many documents are split.

    Raises:
        ConfigurationError: the documents of an item do not fit.
    """
    parts = config.pack_parts or config.context_parallel
    field = "pack_parts" if config.pack_parts else "context_parallel"
    if parts == 1 or not len(store):
        return
    width = config.max_seq_length // parts
    totals = store.lengths
    if store.items is not None:
        totals = np.add.reduceat(store.lengths, store.items[:-1])
    long = int((totals > width).sum())
    if long and not objective.of_tokens:
        longest = int(totals.max())
        raise ConfigurationError(
            f"{field}={parts}: objective={config.objective!r} compares whole documents, which "
            f"must lie on one process, and those of {long} of {len(totals)} rows are longer than "
            f"max_seq_length / {parts} = {width} tokens: up to {longest}; raise max_seq_length to "
            f"{2 * parts * -(-longest // 2)}, or lower {field}"
        )
    logger.info(
        "%d of %d documents are longer than %d tokens: split over those that share packs",
        long,
        len(totals),
        width,
    )


@torch.no_grad()
def prove_context(presented: PresentedModel, ranks: Mesh) -> None:
    """Check that ranks which share documents compute the hidden states of whole documents.

    One of the documents is split. All ranks must call it, inside the context in which the model attends within documents.

    Raises:
        ConfigurationError: a hidden state differs, because layers mix tokens in other ways than
            attention; raised on every rank.
    """
    context = ranks.context
    if context is None:
        return
    model = presented.model
    count = context.count
    first = count * PROOF_TOKENS - 5
    second = PROOF_TOKENS // 3
    rest = count * (PROOF_TOKENS + second) - first - second
    device = embedding_table(model).device
    shared = np.array([SPLIT, count - 1, NOBODY])
    whole, turned, more = (
        _documents(presented, lengths)
        for lengths in ((first, second), (second, first), (first, second, rest))
    )
    rows = rank_share(more.cu_seqlens.numpy(), shared, context).rows
    with in_evaluation(model), WAITING.within():
        expected, swapped, found = (
            presented.as_forward(partial(presented.hidden_states, batch.to(device)))
            for batch in (whole, turned, part_of(more, shared, context))
        )
        noise = _largest(swapped.roll(first, 0), expected)
        there = torch.as_tensor(rows >= 0, device=device)
        error = _largest(found[there], expected[torch.as_tensor(rows[rows >= 0], device=device)])
    told = ranks.gather_values([error, noise])
    if not all(error <= max(LEAST_DEVIATION, NOISE_FACTOR * noise) for error, noise in told):
        raise ConfigurationError(
            f"context_parallel={context.count}: {type(model).__name__} computes something else of "
            "a part of a document than of "
            "the whole: its layers mix tokens otherwise than by attention; leave it out"
        )


def _largest(found: Tensor, expected: Tensor) -> float:
    """Return the largest relative deviation of a token's hidden state; both are ``[T, D]``."""
    found = found.float()
    expected = expected.float()
    return float(((found - expected).norm(dim=-1) / expected.norm(dim=-1)).max())


def _documents(presented: PresentedModel, lengths: tuple[int, ...]) -> Batch:
    """Return a Batch of random documents of these lengths.

    A document depends only on its length, so it is the same in any order and on every rank.
    """
    table = embedding_table(presented.model)
    texts = [
        torch.randint(0, len(table), (length,), generator=torch.Generator().manual_seed(length))
        for length in lengths
    ]
    return Batch(
        torch.cat(texts),
        torch.full((sum(lengths),), IGNORED),
        torch.cat([torch.arange(length) for length in lengths]),
        torch.tensor([0, *accumulate(lengths)], dtype=torch.int32),
        max_seqlen=max(lengths),
    )
