"""Adapters and trained token rows in plain torch: the papers' formulas as hooks on a model."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from chronicals.config import ChronicalsConfig
from chronicals.lora.targets import linear_shape
from chronicals.models import beside_text, is_within

FEW_TOKENS = 4
_FIRST_TOKEN = 3
"""Length and token id of a forward pass that shows which layers a class calls."""


@dataclass(frozen=True)
class PlainAdapters:
    """The adapters of one model.

    Attributes:
        model: without adapters.
        device: of new parameters.
        trained: everything that is trained, by the names of the run's parameters.
    """

    model: Any
    device: torch.device
    trained: dict[str, nn.Parameter] = field(default_factory=dict)

    def attach(self, fields: Mapping[str, Any]) -> None:
        """Freeze the model and attach ``x ↦ layer(x) + scale · B (A x)`` to every targeted layer.

        With ``use_dora`` each row of ``W + scale · B A`` is rescaled to a trained length.
        """
        self.model.requires_grad_(False)
        paths = targeted(self.model, fields["target_modules"], fields["layers"])
        for name, parameter in self.model.named_parameters():
            if any(
                f".{name}".endswith(f".{whole}.weight") for whole in fields["modules_to_save"] or ()
            ):
                self.trained[name] = parameter.requires_grad_(True)
        paths = [path for path in paths if f"{path}.weight" not in self.trained]
        self._train_rows(fields["trainable_token_indices"])
        self._adapt_parameters(fields)
        # A layer that is not called although its owner is: the owner reads its weight instead, as
        # Mamba does.
        called: set[str] = set()
        owners = {path.rpartition(".")[0] for path in paths}
        hooks = [
            self.model.get_submodule(path).register_forward_pre_hook(
                lambda *_, path=path: called.add(path)
            )
            for path in {*paths, *owners}
        ]
        device = next(self.model.parameters()).device
        ids = torch.full((1, FEW_TOKENS), _FIRST_TOKEN, device=device)
        with torch.no_grad():
            self.model(input_ids=ids, use_cache=False)
        for hook in hooks:
            hook.remove()
        read = {path for path in paths if path not in called and path.rpartition(".")[0] in called}
        for path in paths:
            rank, scale = rank_and_scale(fields, path)
            layer = self.model.get_submodule(path)
            if isinstance(layer, nn.Embedding):
                self._adapt_embedding(path, layer, rank, scale)
                continue
            weight = layer.get_parameter("weight")
            wide, narrow = (
                weight.shape[::-1] if isinstance(layer, nn.Linear) else weight.shape
            )  # Conv1D is [in, out]
            a = nn.Parameter(torch.randn(rank, wide, device=self.device) / math.sqrt(wide))
            b = nn.Parameter(torch.zeros(narrow, rank, device=self.device))
            self.trained[f"{path}.lora_A"] = a
            self.trained[f"{path}.lora_B"] = b
            upright = isinstance(layer, nn.Linear)
            lengths = None
            if fields["use_dora"]:
                lengths = nn.Parameter(weight.detach().float().norm(dim=1 if upright else 0))
                self.trained[f"{path}.lora_magnitude_vector"] = lengths
            if path in read:
                adapted = partial(_adapted_weight, a, b, scale, upright, lengths)
                parametrize.register_parametrization(layer, "weight", _Changed(adapted))
            else:
                layer.register_forward_hook(partial(_with_adapter, a, b, scale, lengths))

    def _adapt_embedding(self, path: str, layer: nn.Embedding, rank: int, scale: float) -> None:
        """Attach ``ids ↦ layer(ids) + scale · e · (B A)ᵀ[ids]``; e is the class's own scale."""
        a = nn.Parameter(torch.zeros(rank, layer.num_embeddings, device=self.device))
        b = nn.Parameter(torch.randn(layer.embedding_dim, rank, device=self.device))
        self.trained[f"{path}.lora_embedding_A"] = a
        self.trained[f"{path}.lora_embedding_B"] = b
        scale *= float(getattr(layer, "embed_scale", 1.0))

        def add(layer: Any, inputs: tuple[Tensor, ...], out: Tensor) -> Tensor:
            rows = F.embedding(inputs[0], a.t(), layer.padding_idx).to(out.dtype)
            return out + F.linear(rows, b.to(out.dtype)) * scale

        layer.register_forward_hook(add)

    def _adapt_parameters(self, fields: Mapping[str, Any]) -> None:
        """Make layers run with ``W[e] + scale · B[e] A[e]`` instead of a targeted parameter W."""
        layers = fields["layers"]
        ends = tuple(f".{end}" for end in fields["target_parameters"] or ())
        named = []
        for name, _ in self.model.named_parameters():
            numbers = [int(part) for part in name.split(".") if part.isdigit()]
            is_in_layer = layers is None or any(number in layers for number in numbers)
            if is_in_layer and f".{name}".endswith(ends):
                named.append(name)
        for full in named:
            owner, _, name = full.rpartition(".")
            beneath = [n for n in named if n.rpartition(".")[0] == owner]
            path = owner + ".base_layer" * (len(beneath) - 1 - beneath.index(full))
            rank, scale = rank_and_scale(fields, full)
            layer = self.model.get_submodule(owner)
            weight = layer.get_parameter(name)
            transposed = bool(getattr(layer, "is_transposed", False))
            experts = weight.shape[0] if weight.ndim == 3 else 1
            narrow, wide = (
                weight.shape[:-3:-1] if weight.ndim == 3 and transposed else weight.shape[-2:]
            )
            a = nn.Parameter(
                torch.randn(experts * rank, wide, device=self.device) / math.sqrt(wide)
            )
            b = nn.Parameter(torch.zeros(narrow, rank * experts, device=self.device))
            self.trained[f"{path}.lora_A"] = a
            self.trained[f"{path}.lora_B"] = b
            _put_in_place(layer, name, a, b, scale, experts, transposed)

    def _train_rows(self, asked: Any) -> None:
        """Train the rows of some tokens in the embedding, and in the head if it is tied to it.

        Args:
            asked: token ids of the embedding, or a dictionary of token ids by layer name.
        """
        ends = {
            path: layer
            for path, layer in self.model.named_modules()
            if layer is self.model.get_input_embeddings()
            or layer is self.model.get_output_embeddings()
        }
        known: dict[int, nn.Parameter] = {}
        named: Mapping[str, Any] = {}
        if isinstance(asked, Mapping):
            named = asked
        elif asked is not None:
            named = {next(iter(ends)): asked}
        for name, tokens in named.items():
            weight = next(
                layer for path, layer in ends.items() if f".{path}".endswith(f".{name}")
            ).get_parameter("weight")
            ids = torch.tensor(list(tokens), device=self.device)
            for path, layer in ends.items():
                if layer._parameters.get("weight") is weight:
                    if id(weight) not in known:
                        known[id(weight)] = nn.Parameter(weight.detach()[ids].float())
                        self.trained[f"{path}.lora_tokens"] = known[id(weight)]
                    with_rows = partial(_with_rows, ids, known[id(weight)])
                    parametrize.register_parametrization(layer, "weight", _Changed(with_rows))


def _put_in_place(
    layer: nn.Module,
    name: str,
    a: nn.Parameter,
    b: nn.Parameter,
    scale: float,
    experts: int,
    transposed: bool,
) -> None:
    """Replace parameter ``name`` by the adapted one while the layer runs.

    Args:
        layer: that owns the parameter.
        name: of the parameter.
        a: A, ``[experts · rank, in]``, grouped by expert.
        b: B, ``[out, rank · experts]``, grouped by rank.
        scale: of their product.
        experts: how many the parameter stacks.
        transposed: the parameter is ``[E, in, out]``.
    """

    def before(layer: nn.Module, _: Any) -> None:
        weight = layer.get_parameter(name)
        down = a.view(experts, -1, a.shape[1])
        up = b.view(len(b), -1, experts)
        update = torch.einsum("ore,eri->eoi", up, down) * scale
        if weight.ndim != 3:
            update = update[0]
        elif transposed:
            update = update.transpose(1, 2)
        layer.__dict__[name] = (weight.float() + update).to(weight.dtype)

    def after(layer: nn.Module, _inputs: Any, _out: Any) -> None:
        layer.__dict__.pop(name)

    layer.register_forward_pre_hook(before)
    # A checkpoint leaves the layer by an exception once it has recomputed the last tensor it needs.
    layer.register_forward_hook(after, always_call=True)


class _Changed(nn.Module):
    """Parametrization by a function of the weight, whose tensors are no parameters of the model."""

    def __init__(self, change: Callable[[Tensor], Tensor]):
        super().__init__()
        self.forward = change


def _with_rows(ids: Tensor, rows: nn.Parameter, weight: Tensor) -> Tensor:
    """Return a weight with other rows for some tokens."""
    return weight.index_copy(0, ids, rows.to(weight.dtype))


def _adapted_weight(
    a: nn.Parameter,
    b: nn.Parameter,
    scale: float,
    upright: bool,
    lengths: nn.Parameter | None,
    weight: Tensor,
) -> Tensor:
    """Return ``W + scale · B A``, transposed for a Conv1D's weight ``[in, out]``.

    If ``lengths`` are given, the rows are rescaled to these lengths (DoRA).
    """
    update = (b @ a) * scale
    total = weight.float() + (update if upright else update.t())
    if lengths is not None:
        along = 1 if upright else 0
        total = total * (lengths / total.detach().norm(dim=along)).unsqueeze(along)
    return total.to(weight.dtype)


def _with_adapter(
    a: nn.Parameter,
    b: nn.Parameter,
    scale: float,
    lengths: nn.Parameter | None,
    layer: Any,
    inputs: tuple[Tensor, ...],
    out: Tensor,
) -> Tensor:
    """Return a linear layer's output with an adapter added; a forward hook.

    The matrices are fp32 and the products in the dtype of the layer's input, like PEFT's layer in a
    trainer that computes in that dtype.
    """
    x = inputs[0]
    added = (F.linear(F.linear(x, a.to(x.dtype)), b.to(x.dtype)) * scale).to(out.dtype)
    if lengths is None:
        return out + added
    bias = layer.bias
    if bias is None:
        bias = torch.zeros((), dtype=out.dtype, device=out.device)
    weight = layer.weight if isinstance(layer, nn.Linear) else layer.weight.t()
    norms = (weight.float() + scale * (b @ a)).detach().norm(dim=1)
    return ((out - bias + added) * (lengths / norms) + bias).to(out.dtype)


def adapter_fields(model: Any, config: ChronicalsConfig) -> dict[str, Any]:
    """Return the fields of the adapters that ``model`` has, or that the run will attach."""
    if hasattr(model, "chronicals_lora"):
        return vars(model.chronicals_lora)
    named = (
        "target_modules",
        "target_parameters",
        "layers",
        "rank",
        "alpha",
        "rank_pattern",
        "alpha_pattern",
        "modules_to_save",
    )
    return {name: getattr(config, f"lora_{name}") for name in named} | {
        "use_rslora": config.use_rslora,
        "use_dora": config.use_dora,
        "trainable_token_indices": config.lora_trainable_tokens,
    }


def rank_and_scale(fields: Mapping[str, Any], path: str) -> tuple[int, float]:
    """Return the rank and the scale of the adapter at ``path``."""
    found = {name: fields[name] for name in ("rank", "alpha")}
    for name in found:
        for key, value in reversed(fields[f"{name}_pattern"].items()):
            if re.fullmatch(f"(.*\\.)?({key})", path):
                found[name] = value
    rank = int(found["rank"])
    return rank, found["alpha"] / (math.sqrt(rank) if fields["use_rslora"] else rank)


def targeted(
    model: Any, wanted: list[str] | str | None, layers: Collection[int] | None = None
) -> list[str]:
    """Return the paths of the linear layers and embeddings to adapt, in a model without adapters.

    Args:
        model: without adapters.
        wanted: ``target_modules``: suffixes of paths, a regular expression, or ``all-linear``.
        layers: indices of the layers to adapt; None for all.
    """
    if layers is not None:
        found = [(path, re.search(r"\.(\d+)\.", path)) for path in targeted(model, wanted)]
        return [path for path, number in found if number and int(number[1]) in layers]
    head = model.get_output_embeddings()
    paths = [path for path, layer in model.named_modules() if linear_shape(layer)]
    if wanted is None or wanted == "all-linear":
        towers = beside_text(model)
        return [
            path
            for path in paths
            if model.get_submodule(path) is not head and not is_within(path, towers)
        ]
    paths += [path for path, layer in model.named_modules() if isinstance(layer, nn.Embedding)]
    if isinstance(wanted, str):
        return [path for path in paths if re.fullmatch(wanted, path)]
    ends = tuple(f".{name}" for name in wanted)
    return [path for path in paths if f".{path}".endswith(ends)]
