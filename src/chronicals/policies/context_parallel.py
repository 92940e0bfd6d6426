"""Packs that several processes share, each with some documents and a part of long ones
(``context_parallel``).
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
from chronicals.data.packs.dealing import NOBODY, part_of, share_of
from chronicals.data.packs.parts import SPLIT
from chronicals.distributed import WAITING, Mesh
from chronicals.model_shape import ModelShape
from chronicals.models import PresentedModel, embedding_table, in_evaluation, why_neighbours_matter
from chronicals.objectives import Objective
from chronicals.policies.facts import Facts
from chronicals.policies.policy import Course, Decision, Load, Policy, register

logger = logging.getLogger(__name__)

SKIPPING = ("layerdrop", "decoder_layerdrop")
"""Fields of configurations: how likely a layer is left out in training."""

TOKENS = 32
"""Of each rank's part of the split document on which parts are compared with the whole."""

LEAST = 0.02
OF_NOISE = 5.0
"""Deviation of a token's hidden state, relative, that is allowed: this, or a multiple of what
another order of the documents changes in the model's own arithmetic."""


def sharing_packs(ranks: Mesh, config: ChronicalsConfig, model: Any) -> Mesh:
    """The processes, ``context_parallel`` of which share each pack, and how they attend to
    documents that are split. All ranks call it alike.

    Raises:
        ConfigurationError: they cannot be divided so.
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
        among = "all" if inner == number else f"{inner} neighbours"
        means = [f"{among} exchange heads (all-to-all)"] if inner > 1 else []
        means += [f"keys and values of {number // inner} are gathered"] if inner < number else []
        why = (
            "as asked" if asked else f"{len(set(machines))} machine(s), {shape.kv_heads} key heads"
        )
        logger.info(
            "context_parallel=%d: to attend to split documents %s (%s)",
            number,
            ", and ".join(means),
            why,
        )
    return ranks.sharing_packs(number, inner)


def exchanging(machines: Sequence[str], number: int, heads: int, key_heads: int) -> int:
    """The most neighbours of ``number`` that are on one machine and among which query and key heads
    can be divided.

    Args:
        machines: of each rank.
    """
    for inner in range(number, 1, -1):
        divides = not (number % inner or heads % inner or key_heads % inner)
        if divides and all(
            len({*machines[first : first + inner]}) == 1 for first in range(0, len(machines), inner)
        ):
            return inner
    return 1


def skips_layers(model: Any) -> bool:
    """Whether a training pass leaves layers out at random."""
    return any(getattr(model.config, field, 0) for field in SKIPPING)


def check_dealt(store: TokenStore, objective: Objective, config: ChronicalsConfig) -> None:
    """Raises ConfigurationError where an objective compares whole documents and those of an item
    do not fit in a part of a pack; says otherwise how many are split."""
    parts = config.pack_parts or config.context_parallel
    field = "pack_parts" if config.pack_parts else "context_parallel"
    if parts == 1 or not len(store):
        return
    width = config.max_seq_length // parts
    totals = (
        store.lengths if store.items is None else np.add.reduceat(store.lengths, store.items[:-1])
    )
    long = int((totals > width).sum())
    if long and not objective.of_tokens:
        raise ConfigurationError(
            f"{field}={parts}: objective={config.objective!r} compares whole documents, which "
            "must lie on one process, and "
            f"those of {long} of {len(totals)} rows are longer than max_seq_length / {parts} = "
            f"{width} tokens: up to "
            f"{int(totals.max())}; raise max_seq_length to "
            f"{2 * parts * -(-int(totals.max()) // 2)}, or lower {field}"
        )
    logger.info(
        "%d of %d documents are longer than %d tokens: split over those that share packs",
        long,
        len(totals),
        width,
    )


class ContextParallel(Policy):
    """Several processes share each pack: documents, and parts of those too long for one."""

    name = "context_parallel"
    title = ""  # the log has a line of its own, which sharing_packs writes
    before_memory = True

    def asked(self, config: ChronicalsConfig) -> bool:
        return config.context_parallel > 1

    def why_not(self, facts: Facts) -> str | None:
        """Return what keeps documents of a model's packs from being split over processes."""
        model = facts.model
        name = type(model).__name__
        if not facts.packed:
            return f"{name} takes documents as padded rows"
        if facts.one_by_one:
            return f"{name} attends to one document after the other"
        if skips_layers(model):
            return f"{name} skips layers at random, each process others"
        if facts.records_routers:
            return f"the router loss of {name} is one of whole packs"
        if reason := why_neighbours_matter(model.config, facts.config.max_seq_length):
            return reason
        shape = ModelShape.of(model.config)
        undivided = why_not_divided(shape.heads, shape.kv_heads, facts.exchanging)
        return undivided and f"{undivided}; context_heads=1 divides none"

    def decide(self, facts: Facts, course: Course) -> Decision:
        self.check(facts)
        if facts.context == 1:
            return Decision(self.name, False, "not asked for")
        return Decision(self.name, True, "as asked")

    def check(self, facts: Facts) -> None:
        """Raise ConfigurationError where packs are shared and the model cannot take them so."""
        if facts.context > 1 and (reason := self.why_not(facts)):
            raise ConfigurationError(
                f"context_parallel={facts.context}: {reason}; leave it out (or set it to 1)"
            )

    def bytes(self, facts: Facts, load: Load) -> Load:
        """A process has its part of the tokens of a forward pass."""
        return replace(load, step=replace(load.step, tokens=load.step.tokens // facts.context))


CONTEXT_PARALLEL = register(ContextParallel())


def check_frozen_context(facts: Facts, frozen: Iterable[PresentedModel]) -> None:
    """Raise ConfigurationError where a frozen model of the objective cannot take shared packs."""
    for presented in frozen:
        other = replace(
            facts,
            model=presented.model,
            packed=presented.packed,
            one_by_one=presented.one_by_one,
            records_routers=presented.records_routers,
        )
        CONTEXT_PARALLEL.check(other)


@torch.no_grad()
def prove_context(presented: PresentedModel, ranks: Mesh) -> None:
    """Compare each rank's share of some documents, one of which is split, with what the model makes
    of them whole; all ranks call it alike, where the model attends to documents.

    Raises:
        ConfigurationError: one differs, on every rank: layers mix tokens otherwise than by
            attention.
    """
    context = ranks.context
    if context is None:
        return
    model = presented.model
    count = context.count
    first = count * TOKENS - 5
    second = TOKENS // 3
    rest = count * (TOKENS + second) - first - second
    device = embedding_table(model).device
    shared = np.array([SPLIT, count - 1, NOBODY])
    whole, turned, more = (
        _documents(presented, lengths)
        for lengths in ((first, second), (second, first), (first, second, rest))
    )
    rows = share_of(more.cu_seqlens.numpy(), shared, context).rows
    with in_evaluation(model), WAITING.within():
        expected, swapped, found = (
            presented.as_forward(partial(presented.hidden_states, batch.to(device)))
            for batch in (whole, turned, part_of(more, shared, context))
        )
        noise = _largest(swapped.roll(first, 0), expected)
        there = torch.as_tensor(rows >= 0, device=device)
        error = _largest(found[there], expected[torch.as_tensor(rows[rows >= 0], device=device)])
    told = ranks.gather_values([error, noise])
    if not all(error <= max(LEAST, OF_NOISE * noise) for error, noise in told):
        raise ConfigurationError(
            f"context_parallel={context.count}: {type(model).__name__} computes something else of "
            "a part of a document than of "
            "the whole: its layers mix tokens otherwise than by attention; leave it out"
        )


def _largest(found: Tensor, expected: Tensor) -> float:
    """Deviation of a token's hidden state, relative, of ``[T, D]``."""
    found = found.float()
    expected = expected.float()
    return float(((found - expected).norm(dim=-1) / expected.norm(dim=-1)).max())


def _documents(presented: PresentedModel, lengths: tuple[int, ...]) -> Batch:
    """Documents of random tokens, one for each length, the same wherever they stand and on every
    rank.
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
