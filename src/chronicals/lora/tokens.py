"""Trained tokens: some rows of an embedding are trained, and of the head where both are one weight;
all others are frozen.

    y = R[slot(x)] where x is one of the tokens, W[x] elsewhere        of the embedding
    y = h Wᵀ + b,  y[:, i] = h Rᵀ + b[i]                               of the head, for the tokens i

R holds whole rows, not differences, so that a base whose rows of added tokens were drawn anew gives
the same model. W is never copied: the loss takes W, i and R apart
(``kernels/linear_cross_entropy.py``). PEFT's ``trainable_token_indices``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from chronicals.kernels.adapter import Rows
from chronicals.models.head import register_layer_with_rows

Tokens = Sequence[int] | Mapping[str, Sequence[int]]
"""Token ids, of the input embedding; or by the ends of the paths of embedding and head."""

FILE_NAME = "token_adapter.trainable_tokens_delta"
"""What a file calls the rows, after the path of the layer."""

FIELD = "lora_trainable_tokens"


class TrainedTokens(nn.Module):
    """A frozen embedding or head with trained rows for some tokens, at least fp32; they start as
    those of the weight.

    Args:
        base_layer: an ``nn.Embedding`` or ``nn.Linear``.
        tokens: numbers of the rows.
        owner: what has the rows already, where this layer has the same weight.

    Attributes:
        lora_tokens: ``[n, D]``, in the order of ``tokens``; None where the owner has them.
        padding: the row of the token whose row gets no gradient from an embedding, if it is one of
            these.
        enabled: whether the rows take the place of the weight's (``without_adapters``).
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
        """What stands for rows of the weight; None where it is off."""
        return Rows(self.token_ids, self.values) if self.enabled else None

    @property
    def weight(self) -> Tensor:
        """A copy of the weight with the rows in it, for a model that reads it instead of calling
        the layer.
        """
        weight = cast(Tensor, self.base_layer.weight)
        return weight if self.rows is None else self.rows.within(weight)

    @property
    def bias(self) -> Tensor | None:
        return cast(Tensor | None, getattr(self.base_layer, "bias", None))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base_layer(x)
        if not self.enabled:
            return y
        return (
            self._embedded(x, y)
            if isinstance(self.base_layer, nn.Embedding)
            else self._projected(x, y)
        )

    def _embedded(self, x: Tensor, y: Tensor) -> Tensor:
        place = torch.searchsorted(self.ascending, x).clamp_(max=len(self.ascending) - 1)
        found = F.embedding(self.order[place], self.values, self.padding)
        scale = getattr(self.base_layer, "embed_scale", None)
        found = (
            found.to(y.dtype) if scale is None else found.to(y.dtype) * torch.as_tensor(scale).to(y)
        )
        return torch.where((self.ascending[place] == x)[..., None], found, y)

    def _projected(self, h: Tensor, y: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias[self.token_ids]
        theirs = F.linear(h, self.values.to(h.dtype), None if bias is None else bias.to(h.dtype))
        return y.index_copy(-1, self.token_ids, theirs.to(y.dtype))


register_layer_with_rows(TrainedTokens)


def trained_tokens(model: nn.Module) -> Iterator[tuple[str, TrainedTokens]]:
    """Paths and modules of the layers with rows of their own, not of those that share them."""
    found = (
        (path, module)
        for path, module in model.named_modules()
        if isinstance(module, TrainedTokens)
    )
    return ((path, module) for path, module in found if module.lora_tokens is not None)


def plan_tokens(
    model: Any, wanted: Tokens | None, taken: Collection[str], rows: int | None = None
) -> dict[str, list[int]]:
    """The tokens of embedding and head by path; a head that is the embedding has none of its own.

    Args:
        taken: paths of layers that are trained otherwise.
        rows: that the embedding will have; by default those that it has.

    Raises:
        ValueError: a token is not in the embedding, or stands twice; a name is of another layer, or
            the layer cannot have trained rows.
    """
    if wanted is None:
        return {}
    paths = _ends(model)
    ends = {path: model.get_submodule(path) for path in paths}
    embedding = paths[0]
    named = wanted if isinstance(wanted, Mapping) else {embedding: wanted}
    found: dict[str, list[int]] = {}
    for name, tokens in named.items():
        path = next((path for path in ends if f".{path}".endswith(f".{name}")), None)
        if path is None:
            raise ValueError(
                f"{FIELD}: {name!r} is neither the embedding nor the head, which are "
                f"{', '.join(ends)}"
            )
        found[path] = _checked(list(tokens), rows or len(ends[path].weight), path)
    if _is_tied(ends):
        if embedding not in found or len({frozenset(tokens) for tokens in found.values()}) > 1:
            raise ValueError(
                f"{FIELD}: {' and '.join(ends)} are one weight here; give one list of tokens for "
                "both"
            )
        found = {embedding: found[embedding]}
    for path in ends if _is_tied(ends) else found:
        _check_layer(ends[path], path, path in taken)
    return found


def attach_tokens(model: Any, plan: Mapping[str, Sequence[int]]) -> None:
    """Put trained rows where ``plan_tokens`` says, in place."""
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
    for path, layer in [
        (path, module)
        for path, module in model.named_modules()
        if isinstance(module, TrainedTokens)
    ]:
        weight: Any = layer.base_layer.weight
        weight.index_copy_(0, layer.token_ids, layer.values.to(weight))
        _put(model, path, layer.base_layer)


def remove_tokens(model: Any) -> None:
    """Make the layers plain again; nothing is written into their weights."""
    for path, layer in [
        (path, module)
        for path, module in model.named_modules()
        if isinstance(module, TrainedTokens)
    ]:
        _put(model, path, layer.base_layer)


def tokens_for_file(model: Any) -> list[int] | dict[str, list[int]]:
    """PEFT's field: a list where it is of the embedding alone, which PEFT finds itself."""
    plan = {path: layer.token_ids.tolist() for path, layer in trained_tokens(model)}
    return next(iter(plan.values())) if list(plan) == _ends(model)[:1] else plan


def _put(model: Any, path: str, layer: Any) -> Any:
    parent, _, name = path.rpartition(".")
    setattr(
        model.get_submodule(parent),
        name,
        layer.train(model.training) if isinstance(layer, TrainedTokens) else layer,
    )
    return layer


def _ends(model: Any) -> list[str]:
    """Paths of the input embedding and of the head, where there is one."""
    both = model.get_input_embeddings(), model.get_output_embeddings()
    named = {id(module): path for path, module in model.named_modules()}
    return [named[id(end)] for end in both if end is not None]


def _is_tied(ends: Mapping[str, Any]) -> bool:
    """Whether embedding and head are one weight."""
    weights = [getattr(layer, "base_layer", layer).weight for layer in ends.values()]
    return len(weights) == 2 and weights[0] is weights[1]


def _checked(tokens: list[Any], rows: int, path: str) -> list[int]:
    if not tokens:
        raise ValueError(f"{FIELD}: no token is given for {path}; give token ids, or leave it out")
    for token in tokens:
        if not isinstance(token, int) or isinstance(token, bool):
            raise ValueError(
                f"{FIELD}: {token!r} is no token id; a tokenizer gives it: "
                f"convert_tokens_to_ids({token!r})"
            )
        if not 0 <= token < rows:
            raise ValueError(
                f"{FIELD}: {path} has {rows} rows, and none is that of token {token}; add it to "
                "the tokenizer, and call "
                "model.resize_token_embeddings(len(tokenizer))"
            )
    if twice := [token for token in tokens if tokens.count(token) > 1]:
        raise ValueError(f"{FIELD}: token {twice[0]} stands twice; leave one out")
    return tokens


@torch.no_grad()
def _check_layer(layer: Any, path: str, taken: bool) -> None:
    """Raises ValueError where rows of the layer cannot be trained by themselves."""
    if taken:
        raise ValueError(
            f"{FIELD}: {path} is trained by lora_target_modules or lora_modules_to_save, too, or "
            "is one weight with what is; "
            "leave it out there, or leave out the tokens"
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
        if torch.allclose(
            layer(ids).float(), (layer.weight[ids] * scale).float(), rtol=1e-2, atol=1e-6
        ):
            return
    raise ValueError(
        f"{FIELD}: {path} is {type(layer).__name__}, which is more than a table of rows; leave "
        "the tokens out"
    )
