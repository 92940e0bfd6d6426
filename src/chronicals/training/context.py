"""Whether processes may share packs, each a part of their tokens (``context_parallel``)."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from chronicals.attention import why_not_divided
from chronicals.batch import IGNORED, Batch
from chronicals.config import ChronicalsConfig, ConfigurationError
from chronicals.distributed import Mesh
from chronicals.model_shape import ModelShape
from chronicals.models import PresentedModel, embedding_table, in_evaluation, why_neighbours_matter
from chronicals.objectives import Objective

SKIPPING = ("layerdrop", "decoder_layerdrop")
"""Fields of configurations: how likely a layer is left out in training."""

TOKENS = 32
"""Of each rank's part of the documents on which parts are compared with the whole."""

LEAST, OF_NOISE = 0.02, 5.0
"""Deviation of a token's hidden state, relative, that is allowed: this, or a multiple of what another order of the documents
changes in the model's own arithmetic."""


def check_context(presented: PresentedModel, objective: Objective, config: ChronicalsConfig, ranks: Mesh) -> None:
    """Raises ConfigurationError where processes share packs and this training cannot be divided by tokens."""
    if ranks.context is None:
        return
    count, tokens = ranks.context.count, config.batch_size * config.max_seq_length
    reason = None
    if not objective.of_tokens:
        reason = f"objective={config.objective!r} compares whole documents, of which each process would have a part"
    elif tokens % count:
        reason = f"batch_size * max_seq_length = {tokens} tokens cannot be divided by {count}"
    for model in (presented, *objective.frozen.values()):
        reason = reason or _why_not(model, config.max_seq_length, count)
    if reason:
        raise ConfigurationError(f"context_parallel={count}: {reason}; leave it out (or set it to 1)")


def _why_not(presented: PresentedModel, width: int, count: int) -> str | None:
    """What keeps the tokens of a model's packs from being divided among so many ranks."""
    name, shape = type(presented.model).__name__, ModelShape.of(presented.model.config)
    if not presented.packed:
        return f"{name} takes documents as padded rows"
    if any(getattr(presented.model.config, field, 0) for field in SKIPPING):
        return f"{name} skips layers at random, each process others"
    if presented.records_routers:
        return f"the router loss of {name} is one of whole packs"
    if reason := why_neighbours_matter(presented.model.config, width):
        return reason
    return why_not_divided(shape.heads, shape.kv_heads, count)


@torch.no_grad()
def prove_context(presented: PresentedModel, ranks: Mesh) -> None:
    """Compare each rank's part of some documents with what the model makes of them whole; all ranks call it alike, where the
    model attends to documents.

    Raises:
        ConfigurationError: one differs, on every rank: layers mix tokens otherwise than by attention.
    """
    context = ranks.context
    if context is None:
        return
    model, (first, second) = presented.model, _lengths(context.count * TOKENS)
    with in_evaluation(model):
        whole, turned = _documents(presented, (first, second)), _documents(presented, (second, first))
        expected, swapped, found = (
            presented.as_forward(partial(presented.hidden_states, batch)) for batch in (whole, turned, whole.part(context))
        )
    noise = _largest(swapped.roll(first, 0), expected)
    error = _largest(found, expected.chunk(context.count)[context.rank])
    told = ranks.gather_values([error, noise])
    if not all(error <= max(LEAST, OF_NOISE * noise) for error, noise in told):
        raise ConfigurationError(
            f"context_parallel={context.count}: {type(model).__name__} computes something else of a part of a document than of "
            "the whole: its layers mix tokens otherwise than by attention; leave it out"
        )


def _lengths(tokens: int) -> tuple[int, int]:
    """Of two documents, of which the first ends within the last part."""
    return tokens - TOKENS // 3, TOKENS // 3


def _largest(found: Tensor, expected: Tensor) -> float:
    """Deviation of a token's hidden state, relative, of ``[T, D]``."""
    found, expected = found.float(), expected.float()
    return float(((found - expected).norm(dim=-1) / expected.norm(dim=-1)).max())


def _documents(presented: PresentedModel, lengths: tuple[int, int]) -> Batch:
    """Two documents of random tokens, one for each length, the same wherever they stand and on every rank."""
    table = embedding_table(presented.model)
    texts = [torch.randint(0, len(table), (length,), generator=torch.Generator().manual_seed(length)) for length in lengths]
    return Batch(
        torch.cat(texts),
        torch.full((sum(lengths),), IGNORED),
        torch.cat([torch.arange(length) for length in lengths]),
        torch.tensor([0, lengths[0], sum(lengths)], dtype=torch.int32),
        max_seqlen=max(lengths),
    ).to(table.device)
