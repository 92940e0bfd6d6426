"""Several adapters on one base, of which one is attached at a time: added, switched, combined and
deleted by name.

Names and meanings are those of PEFT's methods. A combination is an adapter of its own, over the
same base:

    cat      B = [w₁ s₁ B₁  w₂ s₂ B₂ …],  A = [A₁ ; A₂ ; …]         exactly Σ w s B A; the ranks add up
    linear   B = Σ √|w s| B,  A = Σ ±√|w s| A                        of equal ranks; not the sum of the products

Adapters that are not attached are in host memory. The attached one is what the model trains and
saves.
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
from chronicals.lora.embedding_layer import LoRAEmbedding, is_embedding
from chronicals.lora.layers import adapters
from chronicals.lora.loading import adapter_tensors, describe_adapter, shape_of
from chronicals.lora.model_methods import ACTIVE, NAMED, plain_again
from chronicals.lora.targets import linear_shape

Matrices = dict[str, tuple[Tensor, Tensor]]
"""A ``[r, in]`` and B ``[out, r]`` of each layer, by its path."""


@dataclass(frozen=True)
class NamedAdapter:
    """Attributes:
    config: whose targets are the paths of ``matrices``.
    matrices: in host memory.
    """

    config: LoRAConfig
    matrices: Matrices


def adapter_names(model: Any) -> list[str]:
    """Of all that were added; an adapter that was attached otherwise is ``default``."""
    return list(_named(model))


def add_adapter(model: Any, name: str, folder: str | Path) -> None:
    """Read the adapter in ``folder``, ours or PEFT's, beside those that ``model`` has; what is
    attached stays so.

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
    named[name] = _read(model, folder)


def set_adapter(model: Any, name: str) -> Any:
    """Attach the adapter ``name`` in the place of the one that is attached, whose values are kept
    under its own name.

    The matrices are new parameters where the shapes differ, so patch a model, and make its
    optimizer, afterwards.

    Returns:
        ``model``.
    """
    wanted = _find(model, name)
    _keep_values(model)
    there = {path: (layer.pair[0].shape, layer.scale) for path, layer in adapters(model)}
    asked = {
        path: (a.shape, wanted.config.at(path).scale) for path, (a, _) in wanted.matrices.items()
    }
    if there != asked or model.chronicals_lora.use_dora:
        _detach(model)
        apply_lora(model, wanted.config, {})
    model.chronicals_lora = wanted.config
    with torch.no_grad():
        for path, layer in adapters(model):
            layer.dropout = wanted.config.dropout
            for own, kept in zip(layer.pair, wanted.matrices[path], strict=True):
                own.copy_(kept)
    setattr(model, ACTIVE, name)
    return model


def delete_adapter(model: Any, name: str) -> None:
    """Forget an adapter that is not attached.

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
    """Make an adapter of several, as PEFT's method of this name does; ``set_adapter`` attaches it.

    Args:
        names, weights: of the adapters, and how much of each.
        combination_type: ``cat`` or ``linear``.

    Raises:
        ValueError: a name is unknown or taken, or the adapters cannot be combined so.
    """
    if combination_type not in COMBINED:
        raise ValueError(
            f"combination_type={combination_type!r}: takes {' or '.join(COMBINED)}; PEFT has others"
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
    for path in sorted({path for adapter, _ in parts for path in adapter.matrices}):
        there = [(adapter, weight) for adapter, weight in parts if path in adapter.matrices]
        factors = [weight * adapter.config.at(path).scale for adapter, weight in there]
        matrices[path] = COMBINED[combination_type](
            path, factors, [adapter.matrices[path] for adapter, _ in there]
        )
    _named(model)[new_name] = NamedAdapter(_of_scale_one(matrices), matrices)


def _concatenated(
    path: str, factors: Sequence[float], parts: Sequence[tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    pairs = zip(factors, parts, strict=True)
    return torch.cat([a for a, _ in parts]), torch.cat([factor * b for factor, (_, b) in pairs], 1)


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


COMBINED: Mapping[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "cat": _concatenated,
    "linear": _linear,
}


def _of_scale_one(matrices: Matrices) -> LoRAConfig:
    """Of adapters with these matrices, whose scale is in them."""
    ranks = {path: len(a) for path, (a, _) in matrices.items()}
    usual = max(ranks.values())
    others = {re.escape(path): rank for path, rank in ranks.items() if rank != usual}
    return LoRAConfig(
        usual, usual, 0.0, sorted(matrices), rank_pattern=others, alpha_pattern=others
    )


def _named(model: Any) -> dict[str, NamedAdapter]:
    """The model's adapters by name; one that is attached and has no name yet becomes
    ``default``.
    """
    if not hasattr(model, NAMED):
        setattr(model, NAMED, {})
    named: dict[str, NamedAdapter] = getattr(model, NAMED)
    if getattr(model, ACTIVE, None) is None and next(adapters(model), None) is not None:
        setattr(model, ACTIVE, "default")
        _keep_values(model)
    return named


def _keep_values(model: Any) -> None:
    """Take the values of the attached adapter into what is kept under its name."""
    name = getattr(model, ACTIVE, None)
    if name is None:
        return
    config: LoRAConfig = model.chronicals_lora
    if (more := _more_than_matrices(config)) is not None:
        field, value = more
        raise ValueError(
            f"{name!r}: an adapter with {field}={value!r} cannot be switched; save it, and "
            "add_adapter what loads as LoRA"
        )
    held = {path: layer.pair for path, layer in adapters(model)}
    matrices = {
        path: (a.detach().to("cpu", copy=True), b.detach().to("cpu", copy=True))
        for path, (a, b) in held.items()
    }
    getattr(model, NAMED)[name] = NamedAdapter(config, matrices)


THEIRS = {"init": "init_lora_weights"}
"""Fields of a LoRAConfig that PEFT calls otherwise."""


def _more_than_matrices(config: LoRAConfig) -> tuple[str, Any] | None:
    """A field, and its value, by which adapters are more than A and B of layers; None where they
    are that.
    """
    asked: dict[str, Any] = {
        "use_dora": config.use_dora,
        "target_parameters": config.target_parameters,
    }
    asked |= {
        "init": config.init if config.takes_from_weights else None,
        "modules_to_save": config.modules_to_save,
    }
    asked |= {"trainable_token_indices": config.trainable_token_indices}
    return next(((field, value) for field, value in asked.items() if value), None)


def _find(model: Any, name: str) -> NamedAdapter:
    named = _named(model)
    if name not in named:
        raise ValueError(
            f"{name!r}: the model has no adapter of this name; there are "
            f"{', '.join(named) or 'none'}"
        )
    return named[name]


def _detach(model: Any) -> None:
    """Make the model plain again; nothing is merged."""
    for path, layer in reversed(list(adapters(model))):
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, layer.base_layer)
    plain_again(model)


def _read(model: Any, folder: Path) -> NamedAdapter:
    described = describe_adapter(folder)
    config = shape_of(described, described["target_modules"])
    if (more := _more_than_matrices(replace(config, modules_to_save=None))) is not None:
        field = THEIRS.get(more[0], more[0])
        raise ValueError(
            f"{folder}: {field}={described[field]!r}: cannot be one of several; "
            "merge_and_unload() it into a base"
        )
    tensors = adapter_tensors(folder)
    if others := [name for name in tensors if ".lora_" not in name]:
        raise ValueError(
            f"{folder}: holds {others[0]} beside its adapters, which all adapters would share; "
            "load it alone"
        )
    matrices: Matrices = {}
    for path in sorted({name.rpartition(".lora_")[0] for name in tensors}):
        names = ("lora_A.weight", "lora_B.weight"), LoRAEmbedding.MATRICES
        a, b = (
            next((tensors[f"{path}.{name}"] for name in each if f"{path}.{name}" in tensors), None)
            for each in zip(*names)
        )
        shape = _shape_at(model, path)
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
    return NamedAdapter(config, matrices)


def _shape_at(model: Any, path: str) -> tuple[int, int] | None:
    """``(in, out)`` of the linear layer or embedding at a path, adapted or not."""
    try:
        layer = model.get_submodule(path)
    except AttributeError:
        return None
    layer = getattr(layer, "base_layer", layer)
    return linear_shape(layer) or (
        (layer.num_embeddings, layer.embedding_dim) if is_embedding(layer) else None
    )
