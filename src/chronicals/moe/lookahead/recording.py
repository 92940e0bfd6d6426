"""Record what the routers of a mixture do on documents, and the features that heads predict from.

The model is not changed.

Shapes: L layers with routed experts, T tokens, k experts per token, E experts, D hidden size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from chronicals.batch import Batch, document_at
from chronicals.config import ChronicalsConfig
from chronicals.data import BatchStream, filler_token, open_store
from chronicals.models import (
    PresentedModel,
    check_positions,
    embedding_table,
    in_evaluation,
    input_device,
    present,
)
from chronicals.models.routed_experts import chosen_experts
from chronicals.moe.router_losses import CountedTokens
from chronicals.moe.routers import MixtureLayer, mixture_layers
from chronicals.versions import remedy_for_routers


@dataclass(frozen=True)
class Recorded:
    """Recorded documents, one after another, without filler and documents without a target.

    Attributes:
        token_ids: int64 ``[T]``.
        documents: int64 ``[N + 1]``, document bounds.
        experts: int64 ``[L, T, k]``, the chosen experts.
        weights: ``[L, T, k]``, their weights.
        logits: ``[L, T, E]``, router logits.
        features: ``[L, T, D]``, normed inputs of the layers before attention; None if not recorded.
        hidden: ``[T, D]``, last hidden states; None without features.
        embeddings: ``[T, D]``, token embeddings; None without features.
    """

    token_ids: Tensor
    documents: Tensor
    experts: Tensor
    weights: Tensor
    logits: Tensor
    features: Tensor | None = None
    hidden: Tensor | None = None
    embeddings: Tensor | None = None

    def __len__(self) -> int:
        return len(self.token_ids)

    def to(self, device: torch.device) -> Recorded:
        """Return a copy on ``device``, or itself if it is there already.

        Copies from host memory to a GPU go through pinned memory.
        """
        if self.token_ids.device == device:
            return self
        pins = device.type == "cuda" and self.token_ids.device.type == "cpu"
        named = {name: value for name, value in vars(self).items() if value is not None}
        moved = {
            n: (x.pin_memory() if pins else x).to(device, non_blocking=pins)
            for n, x in named.items()
        }
        return replace(self, **moved)

    def part(self, first: int, most: int) -> Recorded:
        """Return up to ``most`` tokens from token ``first`` on."""
        rows = slice(first, first + most)
        there = min(most, len(self) - first)
        bounds = (self.documents - first).clamp(0, there).unique()
        token = ("token_ids", "hidden", "embeddings")
        beside = ("experts", "weights", "logits", "features")
        values = {name: getattr(self, name) for name in (*token, *beside)}
        given = {name: x for name, x in values.items() if x is not None}
        found: dict[str, Any] = {
            name: x[rows] if name in token else x[:, rows] for name, x in given.items()
        }
        return Recorded(documents=bounds, **found)

    def follows(self, distance: int) -> Tensor:
        """Return bool ``[T - distance]``: tokens t and t + distance are in the same document."""
        places = torch.arange(len(self), device=self.documents.device)
        document = document_at(places, self.documents)
        return document[distance:] == document[: len(document) - distance]


def record(
    model: PresentedModel, batches: Iterable[Batch], features: bool = False
) -> Iterator[Recorded]:
    """Record the routers on each Batch, on the model's device.

    Args:
        model: a mixture, as it takes Batches.
        batches: on the device of the model.
        features: if true, also record what heads predict from.

    Raises:
        ValueError: the model is not a known mixture.
    """
    layers = mixture_layers(model.model)
    for batch in batches:
        parts = [batch]
        if not model.packed:  # each document with a target as its own Batch, for padded rows
            parts = []
            counted = CountedTokens.of(batch, None).counted
            bounds = batch.cu_seqlens.tolist()
            for a, b in zip(bounds, bounds[1:]):
                if b <= a or not counted[a]:
                    continue
                ends = torch.tensor([0, b - a], dtype=torch.int32, device=batch.cu_seqlens.device)
                inputs = batch.input_ids[a:b]
                parts.append(
                    Batch(inputs, batch.targets[a:b], batch.position_ids[a:b], ends, b - a)
                )
        for part in parts:
            yield _recorded(model, layers, part, features)  # between two, the model is as it was


@torch.no_grad()
def _recorded(
    model: PresentedModel, layers: list[MixtureLayer], batch: Batch, features: bool
) -> Recorded:
    seen_inputs = list[Tensor]()
    seen_choices = list[tuple[Tensor, Tensor]]()

    def see_choice(_: nn.Module, args: tuple, named: dict[str, Any]) -> None:
        seen_choices.append(chosen_experts(args, named))

    def see_input(_: nn.Module, args: tuple, named: dict[str, Any]) -> None:
        seen_inputs.append(named["hidden_states"] if "hidden_states" in named else args[0])

    with ExitStack() as hooks, in_evaluation(model.model), model.attending_documents():
        for layer in layers:
            chosen_by = layer.experts.register_forward_pre_hook(see_choice, with_kwargs=True)
            hooks.callback(chosen_by.remove)
            if features:
                given_to = layer.attention.register_forward_pre_hook(see_input, with_kwargs=True)
                hooks.callback(given_to.remove)
        computed = model.computed(batch, lookahead=False)
    kept = CountedTokens.of(batch, None).counted.nonzero()[:, 0]
    logits = [x.reshape(-1, x.shape[-1]) for x in computed.router_logits]
    if len(logits) != len(layers):
        name = type(model.model).__name__
        raise ValueError(
            f"{name} gives the logits of {len(logits)} routers and has "
            f"{len(layers)}{remedy_for_routers()}"
        )
    # A document is kept whole or not at all.
    bounds = batch.cu_seqlens.tolist()
    lengths = [int(((kept >= a) & (kept < b)).sum()) for a, b in zip(bounds, bounds[1:])]
    documents = torch.tensor([0, *(n for n in lengths if n)], device=kept.device).cumsum(0)
    found = Recorded(
        batch.input_ids[kept],
        documents,
        torch.stack([ids[kept] for ids, _ in seen_choices]),
        torch.stack([weights[kept] for _, weights in seen_choices]),
        torch.stack([x[kept] for x in logits]),
    )
    if not features:
        return found
    return replace(
        found,
        features=torch.stack([x.reshape(-1, x.shape[-1])[kept] for x in seen_inputs]),
        hidden=computed.states[kept],
        embeddings=model.model.get_input_embeddings()(found.token_ids),
    )


def record_data(
    model: Any,
    tokenizer: Any,
    source: Any,
    config: ChronicalsConfig,
    features: bool = False,
    tokens: int | None = None,
) -> Iterator[Recorded]:
    """Run ``record`` on data, in the order in which training packs it; one item per forward pass.

    Args:
        model: a mixture-of-experts model.
        tokenizer: the model's tokenizer.
        source: data, as ``train`` takes it.
        config: pack width, batch size and data settings.
        features: record what heads predict from, too.
        tokens: stop after this many tokens; None for all.

    Raises:
        DataError: the data cannot be read.
        ValueError: the model is not a known mixture.
    """
    mixture_layers(model)
    rows = embedding_table(model).shape[0]
    device = input_device(model)
    store = open_store(source, tokenizer, config, embedding_rows=rows)
    check_positions(model, store.longest)
    stream = BatchStream(store, config, filler_token(tokenizer, rows), epochs=1, shuffle=True)
    seen = 0
    for recorded in record(present(model), (batch.to(device) for batch in stream), features):
        if tokens is not None and seen >= tokens:
            return
        seen += len(recorded)
        yield recorded
