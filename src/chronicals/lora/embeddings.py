"""Weights that are saved with an adapter beside its matrices.

These are embeddings, if tokens were added whose rows the base's files lack, and modules that are
trained whole: embedding and head, the score of a reward model, heads that predict experts.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from chronicals.lora.config import LoRAConfig
from chronicals.models import BASE_ROWS, SCORE, ModelShape, embedding_table, score_of
from chronicals.models.routed_experts import lookahead_heads

logger = logging.getLogger(__name__)

STORED_EMBEDDINGS = "_chronicals_stores_embeddings"
"""Attribute of a model whose adapter was loaded with embeddings; they are saved with it again."""

Weights = dict[tuple[str, str], Tensor]
"""Tensors of the input embedding and the head, by path of the layer and name of the parameter."""


def _layers(model: Any) -> dict[str, nn.Module]:
    """Return the input embedding and the head by path; of an adapted layer its base layer.

    A model with a score is saved without its head.
    """
    head = None if score_of(model) is not None else model.get_output_embeddings()
    ends = {id(end) for end in (model.get_input_embeddings(), head) if end is not None}
    return {
        path: getattr(module, "base_layer", module)
        for path, module in model.named_modules()
        if id(module) in ends
    }


def _others(model: Any) -> dict[str, nn.Module]:
    """Return by path the modules that may be trained whole and have no rows of tokens.

    They are the score, and the heads that predict experts.
    """
    score = score_of(model)
    modules: dict[str, nn.Module] = {} if score is None else {SCORE: score}
    heads = list(lookahead_heads(model).values())
    if heads:
        for path, module in model.named_modules():
            if any(module is head for head in heads):
                modules[path] = module
    return modules


def ends_in(path: str, *names: str) -> bool:
    """Return whether a path is, or ends in, one of these names."""
    return any(f".{path}".endswith(f".{name}") for name in names)


def with_score(config: LoRAConfig, model: Any) -> LoRAConfig:
    """Return a configuration by which the model's score, if it has one, is trained whole."""
    names = list(config.modules_to_save or ())
    if score_of(model) is None or SCORE in names:
        return config
    return replace(config, modules_to_save=[*names, SCORE])


def modules_to_save(model: Any, names: Collection[str] | None) -> dict[str, nn.Module]:
    """Return by path the modules that are named: embedding, head, score, heads that predict.

    Args:
        model: the model, with adapters or without.
        names: ends of paths.

    Raises:
        ValueError: a name is of none of these, or embedding and head share a weight.
    """
    ends = _layers(model)
    others = _others(model)
    named_ends: dict[str, nn.Module] = {}
    named_others: dict[str, nn.Module] = {}
    for name in names or ():
        of_ends = {path: end for path, end in ends.items() if ends_in(path, name)}
        of_others = {path: other for path, other in others.items() if ends_in(path, name)}
        if not of_ends and not of_others:
            head = model.get_output_embeddings()
            heads = [path for path, module in model.named_modules() if module is head]
            if score_of(model) is not None and any(ends_in(path, name) for path in heads):
                raise ValueError(
                    f"lora_modules_to_save: {name!r} predicts tokens, which a reward model does "
                    "not; leave it out"
                )
            known = ", ".join([*ends, *(path for path in others if path != SCORE)])
            raise ValueError(
                f"lora_modules_to_save: {name!r} is neither the embedding nor the head ({known}), "
                "which alone are trained whole beside adapters; name it in lora_target_modules if "
                "it is a linear layer, or leave it out"
            )
        named_ends |= of_ends
        named_others |= of_others
    weights = [layer.weight for layer in ends.values()]
    if named_ends and len({id(weight) for weight in weights}) < len(weights):
        raise ValueError(
            f"lora_modules_to_save={list(names or ())!r}: embedding and head are one weight here, "
            "of which PEFT makes two; leave it out, or untie them in the base first "
            "(tie_word_embeddings: false, with a weight for each)"
        )
    return named_ends | named_others


def embeddings_to_store(model: Any, base: str | None) -> list[str]:
    """Return the names of the weights of embedding and head that must be saved with the adapter.

    They must if the embedding's rows differ from the base's, if the base's rows are unknown, or if
    they were loaded with the adapter. A head that is tied to the embedding is stored once, as the
    embedding.

    Args:
        model: a model with adapters.
        base: folder or hub name of the base; None if the model was not loaded from one.
    """
    if not getattr(model, STORED_EMBEDDINGS, False):
        rows = embedding_table(model).shape[0]
        base_rows = getattr(model, BASE_ROWS, None)
        if base_rows is None and base is None:  # made in memory: no file has any of its weights
            return []
        if base_rows is None and base is not None:
            base_rows = rows_in_files(model, base)
        if base_rows == rows:
            return []
        if base_rows is None:
            logger.warning(
                "the embedding is saved with the adapter: whether that of its base has other rows "
                "cannot be read"
            )
        else:
            logger.info(
                "the embedding has %d rows, that of the base %d: it is saved with the adapter",
                rows,
                base_rows,
            )
    weights: dict[str, Tensor] = {}
    for path, layer in _layers(model).items():
        prefix = path if model.get_submodule(path) is layer else f"{path}.base_layer"
        for name, tensor in layer.named_parameters(recurse=False):
            if all(tensor is not other for other in weights.values()):
                weights[f"{prefix}.{name}"] = tensor
    return list(weights)


def rows_in_files(model: Any, base: str) -> int | None:
    """Return the rows of the embedding by the configuration of the base; None if it is unreadable.

    The configuration is read in a folder, or in the cache for a hub name. A model that was loaded
    by its hub name left its configuration in the cache, so the hub is not asked.
    """
    try:
        config = type(model.config).from_pretrained(base, local_files_only=True)
    except (OSError, ValueError) as error:
        logger.info("how many rows the embedding of %s has cannot be read: %s", base, error)
        return None
    return ModelShape.of(config).vocabulary or None


def stored_embeddings(model: Any, tensors: dict[str, Tensor], prefix: str) -> Weights:
    """Remove the weights of modules that are saved whole from an adapter's tensors and return them.

    Args:
        model: the model, with adapters or without.
        tensors: tensors by name; names begin with ``prefix``.
        prefix: begins the names in the file.

    Raises:
        ValueError: the base weight that PEFT stored for an adapted head is not the model's.
    """
    weights: Weights = {}
    for path, layer in {**_layers(model), **_others(model)}.items():
        for name, parameter in layer.named_parameters(recurse=False):
            for wrap in ("", ".base_layer", ".token_adapter.base_layer"):
                stored = tensors.pop(f"{prefix}{path}{wrap}.{name}", None)
                if stored is None:
                    continue
                weights[path, name] = stored
                if not wrap or parameter.ndim < 2:
                    continue
                # rows of added tokens may differ, if they were random, but not most rows
                rows = min(len(stored), len(parameter))
                dtype = min(stored.dtype, parameter.dtype, key=lambda dtype: dtype.itemsize)
                own = parameter[:rows].detach().to(stored.device, dtype)
                differ = stored[:rows].to(dtype) != own
                if differ.flatten(1).any(dim=1).float().mean() > 0.5:
                    raise ValueError(
                        f"holds another weight for {path} than the model has: of another model?"
                    )
    return weights


def embedding_rows(model: Any, stored: Weights) -> int:
    """Return the number of rows of the stored embedding; if none is stored, of the model's."""
    others = _others(model)
    counts = [len(tensor) for (path, _), tensor in stored.items() if path not in others]
    return counts[0] if counts else embedding_table(model).shape[0]


@torch.no_grad()
def take_embeddings(model: Any, stored: Weights, whole: Collection[str]) -> None:
    """Copy stored weights into the model, after resizing its embedding and head to their rows.

    Args:
        model: the model, with adapters or without.
        stored: the weights.
        whole: paths of ``modules_to_save``, which are saved again in any case.
    """
    if not stored:
        return
    rows = embedding_rows(model, stored)
    if rows != embedding_table(model).shape[0]:
        model.resize_token_embeddings(rows, mean_resizing=False)
    others = _others(model)
    layers = {**_layers(model), **others}
    for (path, name), tensor in stored.items():
        layers[path].get_parameter(name).copy_(tensor)
    if any(path not in others and path not in whole for path, _ in stored):
        setattr(model, STORED_EMBEDDINGS, True)
