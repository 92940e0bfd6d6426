"""Whether processes may share packs, each a part of their tokens (``context_parallel``)."""

from __future__ import annotations

import torch

from chronicals.attention import why_not_divided
from chronicals.batch import IGNORED, Batch, Context
from chronicals.config import ChronicalsConfig, ConfigurationError
from chronicals.distributed import Mesh
from chronicals.model_shape import ModelShape
from chronicals.models import PresentedModel, embedding_table, in_evaluation, why_neighbours_matter
from chronicals.objectives import Objective

TOKENS = 32
"""Of each rank's part of the documents on which parts are compared with the whole."""

ALIKE = 0.1
"""Of hidden states, relative, in whatever dtype the model is; layers that mix tokens by themselves are off by their outputs."""


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
    if presented.router_loss is not None:
        return f"the router loss of {name} is one of whole packs"
    if reason := why_neighbours_matter(presented.model.config, width):
        return reason
    return why_not_divided(shape.heads, shape.kv_heads, count)


@torch.no_grad()
def prove_context(presented: PresentedModel, context: Context | None) -> None:
    """Compare this rank's part of some documents with what the model makes of them whole; all ranks call it alike, where the
    model attends to documents.

    Raises:
        ConfigurationError: they differ: layers mix tokens otherwise than by attention.
    """
    if context is None:
        return
    model, whole = presented.model, _documents(presented, context.count * TOKENS)
    with in_evaluation(model):
        expected = presented.hidden_states(whole).float().chunk(context.count)[context.rank]
        found = presented.hidden_states(whole.part(context)).float()
    error = float((found - expected).norm() / expected.norm())
    if not error < ALIKE:
        raise ConfigurationError(
            f"context_parallel={context.count}: {type(model).__name__} computes something else of a part of a document than of "
            f"the whole ({error:.0%} of its hidden states): its layers mix tokens otherwise than by attention; leave it out"
        )


def _documents(presented: PresentedModel, tokens: int) -> Batch:
    """Two documents of random tokens, the same on every rank, of which the first ends within the last part."""
    table = embedding_table(presented.model)
    drawing = torch.Generator().manual_seed(0)
    lengths = (tokens - TOKENS // 3, TOKENS // 3)
    batch = Batch(
        torch.randint(0, table.shape[0], (tokens,), generator=drawing),
        torch.full((tokens,), IGNORED),
        torch.cat([torch.arange(length) for length in lengths]),
        torch.tensor([0, lengths[0], tokens], dtype=torch.int32),
        max_seqlen=lengths[0],
    )
    return batch.to(table.device)
