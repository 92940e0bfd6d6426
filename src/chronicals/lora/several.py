"""Several adapters on one base: added, switched, combined and deleted by name.

Names and meanings are those of PEFT's methods. A combination is a new adapter over the same base:

    cat      B = [w₁ s₁ B₁  w₂ s₂ B₂ …],  A = [A₁ ; A₂ ; …]         exactly Σ w s B A; the ranks add up
    linear   B = Σ √|w s| B,  A = Σ ±√|w s| A                        of equal ranks; not the sum of the products

Adapters that are not attached are in host memory. The model trains and saves the attached one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from chronicals.lora.apply import apply_lora
from chronicals.lora.config import LoRAConfig
from chronicals.lora.layers import LoRAEmbedding, adapters, is_embedding
from chronicals.lora.loading import adapter_tensors, describe_adapter, described_config
from chronicals.lora.model_methods import ACTIVE, NAMED, plain_again
from chronicals.lora.targets import linear_shape

Matrices = dict[str, tuple[Tensor, Tensor]]
"""A ``[r, in]`` and B ``[out, r]`` of each layer, by its path."""


@dataclass(frozen=True)
class NamedAdapter:
    """An adapter in host memory.

    Attributes:
        config: its configuration, whose targets are the paths of ``matrices``.
        matrices: A and B of each layer.
    """

    config: LoRAConfig
    matrices: Matrices


def adapter_names(model: Any) -> list[str]:
    """Return the names of all adapters; one that was not added by name is ``default``."""
    return list(_named(model))


def add_adapter(model: Any, name: str, folder: str | Path) -> None:
    """Read another adapter from ``folder``, ours or PEFT's; the attached one stays attached.

    Raises:
        ValueError: the name is taken, the adapter is more than A and B of linear layers, or does
            not fit the model.
    """
    named = _named(model)
    folder = Path(folder)
    if name in named:
        raise ValueError(
            f"{name!r}: the model has an adapter of this name; give another, or delete_adapter "
            "first"
        )
    described = describe_adapter(folder)
    config = described_config(described, described["target_modules"])
    extra = _more_than_matrices(replace(config, modules_to_save=None))
    if extra is not None:
        field = PEFT_FIELDS.get(extra[0], extra[0])
        raise ValueError(
            f"{folder}: {field}={described[field]!r}: cannot be one of several; "
            "merge_and_unload() it into a base"
        )
    tensors = adapter_tensors(folder)
    others = [stored for stored in tensors if ".lora_" not in stored]
    if others:
        raise ValueError(
            f"{folder}: holds {others[0]} beside its adapters, which all adapters would share; "
            "load it alone"
        )
    matrices: Matrices = {}
    for path in sorted({stored.rpartition(".lora_")[0] for stored in tensors}):
        a = tensors.get(f"{path}.lora_A.weight")
        b = tensors.get(f"{path}.lora_B.weight")
        if a is None and b is None:
            a, b = (tensors.get(f"{path}.{side}") for side in LoRAEmbedding.MATRICES)
        try:
            layer: Any = model.get_submodule(path)
        except AttributeError:
            layer = None
        layer = getattr(layer, "base_layer", layer)
        shape = linear_shape(layer)
        if shape is None and is_embedding(layer):
            shape = (layer.num_embeddings, layer.embedding_dim)
        rank = config.at(path).rank
        if (
            a is None
            or b is None
            or shape is None
            or (a.shape, b.shape) != ((rank, shape[0]), (shape[1], rank))
        ):
            raise ValueError(
                f"{folder}: the adapter of {path} does not fit the model: of another one?"
            )
        matrices[path] = a.float(), b.float()
    config = LoRAConfig(**{**vars(config), "target_modules": sorted(matrices)}).fitted(matrices)
    named[name] = NamedAdapter(config, matrices)


def set_adapter(model: Any, name: str) -> Any:
    """Attach the adapter ``name`` in place of the attached one, whose values are kept by name.

    If the shapes differ, the matrices are new parameters, so patch the model and make its optimizer
    afterwards.

    Returns:
        ``model``.
    """
    wanted = _find(model, name)
    _keep_values(model)
    attached_shapes = {path: (layer.pair[0].shape, layer.scale) for path, layer in adapters(model)}
    wanted_shapes = {
        path: (a.shape, wanted.config.at(path).scale) for path, (a, _) in wanted.matrices.items()
    }
    if attached_shapes != wanted_shapes or model.chronicals_lora.use_dora:
        for path, layer in reversed(list(adapters(model))):
            parent, _, child = path.rpartition(".")
            setattr(model.get_submodule(parent), child, layer.base_layer)
        plain_again(model)
        apply_lora(model, wanted.config, {})
    model.chronicals_lora = wanted.config
    with torch.no_grad():
        for path, layer in adapters(model):
            layer.dropout = wanted.config.dropout
            for parameter, values in zip(layer.pair, wanted.matrices[path], strict=True):
                parameter.copy_(values)
    setattr(model, ACTIVE, name)
    return model


def delete_adapter(model: Any, name: str) -> None:
    """Delete an adapter that is not attached.

    Raises:
        ValueError: there is none of this name, or it is attached.
    """
    _find(model, name)
    if name == getattr(model, ACTIVE, None):
        raise ValueError(f"{name!r}: is attached; set_adapter another one first")
    del _named(model)[name]


def add_weighted_adapter(
    model: Any,
    names: Sequence[str],
    weights: Sequence[float],
    new_name: str,
    combination_type: str = "cat",
) -> None:
    """Combine several adapters to a new one, like PEFT's method of this name.

    ``set_adapter`` attaches it.

    Args:
        model: the model with the adapters.
        names: names of the adapters.
        weights: factor of each.
        new_name: name of the combination.
        combination_type: ``cat`` or ``linear``; see the head of this file.

    Raises:
        ValueError: a name is unknown or taken, or the adapters cannot be combined like this.
    """
    if combination_type not in COMBINATIONS:
        raise ValueError(
            f"combination_type={combination_type!r}: takes {' or '.join(COMBINATIONS)}; PEFT has "
            "others"
        )
    if new_name in _named(model):
        raise ValueError(
            f"new_name={new_name!r}: the model has an adapter of this name; give another"
        )
    if not names or len(names) != len(weights):
        raise ValueError(
            f"names has {len(names)} entries, weights {len(weights)}: give one weight for each name"
        )
    _keep_values(model)
    parts = [(_find(model, name), weight) for name, weight in zip(names, weights, strict=True)]
    matrices: Matrices = {}
    paths: set[str] = set()
    for adapter, _ in parts:
        paths.update(adapter.matrices)
    for path in sorted(paths):
        factors = []
        pairs = []
        for adapter, weight in parts:
            if path in adapter.matrices:
                factors.append(weight * adapter.config.at(path).scale)
                pairs.append(adapter.matrices[path])
        matrices[path] = COMBINATIONS[combination_type](path, factors, pairs)
    ranks = {path: len(a) for path, (a, _) in matrices.items()}
    largest = max(ranks.values())
    others = {re.escape(path): rank for path, rank in ranks.items() if rank != largest}
    # alphas are the ranks, so that the scale is 1
    config = LoRAConfig(
        largest, largest, 0.0, sorted(matrices), rank_pattern=others, alpha_pattern=others
    )
    _named(model)[new_name] = NamedAdapter(config, matrices)


def _concatenated(
    path: str, factors: Sequence[float], parts: Sequence[tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    total_a = torch.cat([a for a, _ in parts])
    scaled = [factor * b for factor, (_, b) in zip(factors, parts, strict=True)]
    return total_a, torch.cat(scaled, 1)


def _linear(
    path: str, factors: Sequence[float], parts: Sequence[tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    if len({len(a) for a, _ in parts}) > 1:
        raise ValueError(
            f"combination_type='linear': the adapters of {path} have different ranks; take 'cat'"
        )
    total_a = torch.zeros_like(parts[0][0])
    total_b = torch.zeros_like(parts[0][1])
    for factor, (a, b) in zip(factors, parts, strict=True):
        root = math.sqrt(abs(factor))
        total_a += math.copysign(root, factor) * a
        total_b += root * b
    return total_a, total_b


COMBINATIONS: Mapping[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "cat": _concatenated,
    "linear": _linear,
}
"""Combinations by name: of a path, a factor for each adapter, and A and B of each."""


def _named(model: Any) -> dict[str, NamedAdapter]:
    """Return the model's adapters by name; an attached one without a name becomes ``default``."""
    if not hasattr(model, NAMED):
        setattr(model, NAMED, {})
    named: dict[str, NamedAdapter] = getattr(model, NAMED)
    if getattr(model, ACTIVE, None) is None and next(adapters(model), None) is not None:
        setattr(model, ACTIVE, "default")
        _keep_values(model)
    return named


def _keep_values(model: Any) -> None:
    """Copy the values of the attached adapter to host memory, under its name."""
    name = getattr(model, ACTIVE, None)
    if name is None:
        return
    config: LoRAConfig = model.chronicals_lora
    extra = _more_than_matrices(config)
    if extra is not None:
        field, value = extra
        raise ValueError(
            f"{name!r}: an adapter with {field}={value!r} cannot be switched; save it, and "
            "add_adapter what loads as LoRA"
        )
    matrices: Matrices = {}
    for path, layer in adapters(model):
        a, b = layer.pair
        matrices[path] = (a.detach().to("cpu", copy=True), b.detach().to("cpu", copy=True))
    getattr(model, NAMED)[name] = NamedAdapter(config, matrices)


PEFT_FIELDS = {"init": "init_lora_weights"}
"""PEFT's names of fields of a LoRAConfig, where they differ."""


def _more_than_matrices(config: LoRAConfig) -> tuple[str, Any] | None:
    """Return a field, and its value, by which adapters are more than A and B of layers, or None."""
    extras: dict[str, Any] = {
        "use_dora": config.use_dora,
        "target_parameters": config.target_parameters,
        "init": config.init if config.takes_from_weights else None,
        "modules_to_save": config.modules_to_save,
        "trainable_token_indices": config.trainable_token_indices,
    }
    return next(((field, value) for field, value in extras.items() if value), None)


def _find(model: Any, name: str) -> NamedAdapter:
    named = _named(model)
    if name not in named:
        raise ValueError(
            f"{name!r}: the model has no adapter of this name; there are "
            f"{', '.join(named) or 'none'}"
        )
    return named[name]
