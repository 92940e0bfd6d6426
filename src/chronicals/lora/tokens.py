"""Trained tokens: some rows of an embedding are trained, and of the head if both are one weight.

All other rows are frozen.

    y = R[slot(x)] where x is one of the tokens, W[x] elsewhere        of the embedding
    y = h Wᵀ + b,  y[:, i] = h Rᵀ + b[i]                               of the head, for the tokens i

R has whole rows, not differences, so that a base whose rows of added tokens were drawn anew gives
the same model. W is never copied: the loss takes W, i and R separately
(``kernels/linear_cross_entropy.py``). PEFT calls this ``trainable_token_indices``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from chronicals.kernels.linear_head import Rows
from chronicals.models.linear import LAYERS_WITH_ROWS

TrainedTokenIds = Sequence[int] | Mapping[str, Sequence[int]]
"""Token ids of the input embedding, or lists of them by the ends of the paths of both layers."""

FILE_NAME = "token_adapter.trainable_tokens_delta"
"""Name of the rows in a file, after the path of the layer."""

FIELD = "lora_trainable_tokens"


class TrainedTokens(nn.Module):
    """A frozen embedding or head with trained rows for some tokens, in at least fp32.

    Rows start as those of the weight.

    Args:
        base_layer: an ``nn.Embedding`` or ``nn.Linear``.
        tokens: numbers of the rows.
        owner: the layer that has the rows, if this one shares its weight.

    Attributes:
        lora_tokens: ``[n, D]``, in the order of ``tokens``; None if the owner has them.
        padding: index of the padding token in ``tokens``, whose row gets no gradient from an
            embedding; None if it is not among them.
        enabled: whether the rows replace those of the weight (``without_adapters``).
    """

    lora_tokens: Tensor | None
    token_ids: Tensor
    ascending: Tensor
    order: Tensor

    def __init__(
        self, base_layer: nn.Module, tokens: Sequence[int], owner: TrainedTokens | None = None
    ):
        super().__init__()
        self.base_layer = base_layer.requires_grad_(False)
        weight = cast(Tensor, base_layer.weight)
        self.enabled = True
        padding = getattr(base_layer, "padding_idx", None)
        self.padding = None if padding not in tokens else list(tokens).index(cast(int, padding))
        ids = torch.tensor(list(tokens), dtype=torch.int64, device=weight.device)
        ascending, order = ids.sort()
        for name, value in (("token_ids", ids), ("ascending", ascending), ("order", order)):
            self.register_buffer(name, value, persistent=False)
        self._owner = (owner,)  # in a tuple, so that its rows are in a state dictionary once
        kind = torch.promote_types(weight.dtype, torch.float32)
        self.lora_tokens = nn.Parameter(weight.detach()[ids].to(kind)) if owner is None else None

    @property
    def values(self) -> Tensor:
        """R, ``[n, D]``."""
        owner = self._owner[0]
        return cast(Tensor, self.lora_tokens) if owner is None else owner.values

    @property
    def rows(self) -> Rows | None:
        """The rows that replace those of the weight; None if they are off."""
        return Rows(self.token_ids, self.values) if self.enabled else None

    @property
    def weight(self) -> Tensor:
        """A copy of the weight with the trained rows, for a model that reads it itself."""
        weight = cast(Tensor, self.base_layer.weight)
        return weight if self.rows is None else self.rows.within(weight)

    @property
    def bias(self) -> Tensor | None:
        """The base's bias, or None."""
        return cast(Tensor | None, getattr(self.base_layer, "bias", None))

    def forward(self, x: Tensor) -> Tensor:
        """Return embeddings of the ids x, or logits of the hidden states x, with the rows if on."""
        y: Tensor = self.base_layer(x)
        if not self.enabled:
            return y
        if not isinstance(self.base_layer, nn.Embedding):
            bias = None if self.bias is None else self.bias[self.token_ids].to(x.dtype)
            logits = F.linear(x, self.values.to(x.dtype), bias)
            return y.index_copy(-1, self.token_ids, logits.to(y.dtype))
        place = torch.searchsorted(self.ascending, x).clamp_(max=len(self.ascending) - 1)
        rows = F.embedding(self.order[place], self.values, self.padding).to(y.dtype)
        scale = getattr(self.base_layer, "embed_scale", None)
        if scale is not None:
            rows = rows * torch.as_tensor(scale).to(y)
        return torch.where((self.ascending[place] == x)[..., None], rows, y)


LAYERS_WITH_ROWS.add(TrainedTokens)


def trained_tokens(model: nn.Module) -> Iterator[tuple[str, TrainedTokens]]:
    """Yield path and module of the layers that have the trained rows; not those that share them."""
    for path, module in model.named_modules():
        if isinstance(module, TrainedTokens) and module.lora_tokens is not None:
            yield path, module


def plan_tokens(
    model: Any, wanted: TrainedTokenIds | None, taken: Collection[str], rows: int | None = None
) -> dict[str, list[int]]:
    """Return the trained tokens of embedding and head by path.

    A head that shares the embedding's weight has no entry.

    Args:
        model: the model.
        wanted: token ids, or None.
        taken: paths of layers that are trained in another way.
        rows: number of rows that the embedding will have; by default those that it has.

    Raises:
        ValueError: a token is not in the embedding, or given twice; a name is of another layer; or
            the layer cannot have trained rows.
    """
    if wanted is None:
        return {}
    paths = _ends(model)
    ends = {path: model.get_submodule(path) for path in paths}
    embedding = paths[0]
    named = wanted if isinstance(wanted, Mapping) else {embedding: wanted}
    plan: dict[str, list[int]] = {}
    for name, tokens in named.items():
        path = next((path for path in ends if f".{path}".endswith(f".{name}")), None)
        if path is None:
            raise ValueError(
                f"{FIELD}: {name!r} is neither the embedding nor the head, which are "
                f"{', '.join(ends)}"
            )
        plan[path] = list(tokens)
        count = rows or len(ends[path].weight)
        if not plan[path]:
            raise ValueError(
                f"{FIELD}: no token is given for {path}; give token ids, or leave it out"
            )
        for token in plan[path]:
            if not isinstance(token, int) or isinstance(token, bool):
                raise ValueError(
                    f"{FIELD}: {token!r} is no token id; a tokenizer gives it: "
                    f"convert_tokens_to_ids({token!r})"
                )
            if not 0 <= token < count:
                raise ValueError(
                    f"{FIELD}: {path} has {count} rows, and none is that of token {token}; add it "
                    "to the tokenizer, and call model.resize_token_embeddings(len(tokenizer))"
                )
        twice = [token for token in plan[path] if plan[path].count(token) > 1]
        if twice:
            raise ValueError(f"{FIELD}: token {twice[0]} stands twice; leave one out")
    if _is_tied(ends):
        if embedding not in plan or len({frozenset(tokens) for tokens in plan.values()}) > 1:
            raise ValueError(
                f"{FIELD}: {' and '.join(ends)} are one weight here; give one list of tokens for "
                "both"
            )
        plan = {embedding: plan[embedding]}
    for path in ends if _is_tied(ends) else plan:
        _check_layer(ends[path], path, path in taken)
    return plan


def attach_tokens(model: Any, plan: Mapping[str, Sequence[int]]) -> None:
    """Attach trained rows to the layers of a plan of ``plan_tokens``, in place."""
    ends = {path: model.get_submodule(path) for path in _ends(model)}
    tied = _is_tied(ends)
    for path, tokens in plan.items():
        rows = _put(model, path, TrainedTokens(ends[path], tokens))
        for other in ends if tied else ():
            if other != path:
                _put(model, other, TrainedTokens(ends[other], tokens, rows))


@torch.no_grad()
def merge_tokens(model: Any) -> None:
    """Write the rows into the weights, rounded once, and make the layers plain again."""
    for path, layer in list(model.named_modules()):
        if isinstance(layer, TrainedTokens):
            weight: Any = layer.base_layer.weight
            weight.index_copy_(0, layer.token_ids, layer.values.to(weight))
            _put(model, path, layer.base_layer)


def tokens_for_file(model: Any) -> list[int] | dict[str, list[int]]:
    """Return PEFT's field: one list if only the embedding has trained tokens, else lists."""
    plan = {path: layer.token_ids.tolist() for path, layer in trained_tokens(model)}
    embedding = _ends(model)[0]
    return plan[embedding] if list(plan) == [embedding] else plan


def _put(model: Any, path: str, layer: Any) -> Any:
    """Put a layer at a path of the model, and return it."""
    parent, _, name = path.rpartition(".")
    if isinstance(layer, TrainedTokens):
        layer.train(model.training)
    setattr(model.get_submodule(parent), name, layer)
    return layer


def _ends(model: Any) -> list[str]:
    """Return the paths of the input embedding and of the head, if there is one."""
    both = model.get_input_embeddings(), model.get_output_embeddings()
    named = {id(module): path for path, module in model.named_modules()}
    return [named[id(end)] for end in both if end is not None]


def _is_tied(ends: Mapping[str, Any]) -> bool:
    """Return whether embedding and head are one weight."""
    weights = [getattr(layer, "base_layer", layer).weight for layer in ends.values()]
    return len(weights) == 2 and weights[0] is weights[1]


@torch.no_grad()
def _check_layer(layer: Any, path: str, taken: bool) -> None:
    """Raise ValueError if rows of the layer cannot be trained by themselves.

    Args:
        layer: the embedding or the head.
        path: its path.
        taken: whether the layer is trained in another way.
    """
    if taken:
        raise ValueError(
            f"{FIELD}: {path} is trained by lora_target_modules or lora_modules_to_save, too, or "
            "is one weight with what is; leave it out there, or leave out the tokens"
        )
    if isinstance(layer, nn.Linear) and layer.weight.is_floating_point():
        return
    plain = (
        isinstance(layer, nn.Embedding)
        and layer.max_norm is None
        and not layer.scale_grad_by_freq
        and not layer.sparse
    )
    if plain:
        ids = torch.tensor([0, len(layer.weight) - 1], device=layer.weight.device)
        scale = torch.as_tensor(getattr(layer, "embed_scale", 1.0)).to(layer.weight)
        expected = (layer.weight[ids] * scale).float()
        if torch.allclose(layer(ids).float(), expected, rtol=1e-2, atol=1e-6):
            return
    raise ValueError(
        f"{FIELD}: {path} is {type(layer).__name__}, which is more than a table of rows; leave "
        "the tokens out"
    )
