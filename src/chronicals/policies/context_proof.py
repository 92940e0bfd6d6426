"""Check that a model computes the same hidden states for parts of a document as for the whole."""

from __future__ import annotations

from functools import partial
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from chronicals.batch import IGNORED, Batch
from chronicals.config import ConfigurationError
from chronicals.data.packs.dealing import NOBODY, part_of, rank_share
from chronicals.data.packs.parts import SPLIT
from chronicals.distributed import WAITING, Mesh
from chronicals.models import PresentedModel, embedding_table, in_evaluation

PROOF_TOKENS = 32
"""Tokens of each rank's part of the split document."""

LEAST_DEVIATION = 0.02
"""Relative deviation of a token's hidden state that is always allowed."""

NOISE_FACTOR = 5.0
"""Allowed multiple of the model's own numerical noise.

The noise is measured by the deviation after reordering the documents.
"""


@torch.no_grad()
def prove_context(presented: PresentedModel, ranks: Mesh) -> None:
    """Check that ranks which share documents, one of them split, compute the hidden states of the
    whole.

    All ranks must call it, inside the context in which the model attends within documents.

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
