"""Embeddings that go with an adapter: tokens were added to the base, and the base's own files do not hold their rows."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn

from chronicals.models import BASE_ROWS

logger = logging.getLogger(__name__)

STORED = "_chronicals_stores_embeddings"
"""Attribute of a model whose adapter came with embeddings: it is saved with them again."""

Weights = dict[tuple[str, str], Tensor]
"""Of the input embedding and the head: tensors by the path of the layer and the name of the parameter."""


def _layers(model: Any) -> dict[str, nn.Module]:
    """The input embedding and the head, without an adapter on it, by path."""
    ends = [end for end in (model.get_input_embeddings(), model.get_output_embeddings()) if end is not None]
    return {
        path: getattr(module, "base_layer", module)
        for path, module in model.named_modules()
        if any(module is end for end in ends)
    }


def embeddings_to_store(model: Any, base: str | None) -> list[str]:
    """Names of those weights, where the base has another number of rows, or one that is not known, or where they came with
    the adapter; else none. A head that is tied to the embedding is stored as the embedding.

    Args:
        base: folder or hub name of the base; None where the model was not loaded from one.
    """
    if not getattr(model, STORED, False) and not _is_resized(model, base):
        return []
    found: dict[str, Tensor] = {}
    for path, layer in _layers(model).items():
        prefix = path if model.get_submodule(path) is layer else f"{path}.base_layer"
        for name, tensor in layer.named_parameters(recurse=False):
            if all(tensor is not other for other in found.values()):
                found[f"{prefix}.{name}"] = tensor
    return list(found)


def remember_base_rows(model: Any) -> None:
    """Keep how many rows the embedding has in the files of the model's base, where they can be read: when the adapter is
    saved, they may be gone or out of reach."""
    if getattr(model, BASE_ROWS, None) is None and model.config._name_or_path:
        setattr(model, BASE_ROWS, _rows_in_files(model, model.config._name_or_path))


def _rows_in_files(model: Any, base: str) -> int | None:
    """Rows of the embedding that the configuration at a folder, or of a hub name in the cache, says; None where it cannot be
    read. A model that was loaded by its hub name has left its configuration in the cache: nothing is asked for."""
    try:
        config = type(model.config).from_pretrained(base, local_files_only=True)
    except (OSError, ValueError) as error:
        logger.info("how many rows the embedding of %s has cannot be read: %s", base, error)
        return None
    return getattr(config.get_text_config(), "vocab_size", None)


def _is_resized(model: Any, base: str | None) -> bool:
    """Whether the embedding has other rows than in the files of the base, or may have, because it is not known how many."""
    rows, there = model.get_input_embeddings().weight.shape[0], getattr(model, BASE_ROWS, None)
    if there is None and base is None:  # made in memory: no file has any of its weights
        return False
    if there is None and base is not None:
        there = _rows_in_files(model, base)
    if there is None:
        logger.warning("the embedding is saved with the adapter: whether that of its base has other rows cannot be read")
    elif there != rows:
        logger.info("the embedding has %d rows, that of the base %d: it is saved with the adapter", rows, there)
    return there != rows


def stored_embeddings(model: Any, tensors: dict[str, Tensor], prefix: str) -> Weights:
    """Take those weights out of an adapter's tensors, whose names begin with ``prefix``.

    Raises:
        ValueError: what PEFT stores of an adapted head is another weight than the model's.
    """
    found: Weights = {}
    for path, layer in _layers(model).items():
        for name, own in layer.named_parameters(recurse=False):
            for beneath in ("", ".base_layer"):
                stored = tensors.pop(f"{prefix}{path}{beneath}.{name}", None)
                if stored is not None and beneath and _is_of_another_model(stored, own):
                    raise ValueError(f"holds another weight for {path} than the model has: of another model?")
                if stored is not None:
                    found[path, name] = stored
    return found


def _is_of_another_model(stored: Tensor, own: Tensor) -> bool:
    """Whether most of the rows that both have differ; rows of added tokens do where they were drawn at random."""
    rows = min(len(stored), len(own))
    kind = min(stored.dtype, own.dtype, key=lambda dtype: dtype.itemsize)
    differ = stored[:rows].to(kind) != own[:rows].detach().to(stored.device, kind)
    return bool(differ.flatten(1).any(dim=1).float().mean() > 0.5) if own.ndim > 1 else False


def rows_of(model: Any, stored: Weights) -> int:
    """Rows of the embedding as stored, or else as they are."""
    known = [len(tensor) for tensor in stored.values()]
    return known[0] if known else model.get_input_embeddings().weight.shape[0]


@torch.no_grad()
def take_embeddings(model: Any, stored: Weights) -> None:
    """Put stored weights into the model, whose embedding and head first get as many rows."""
    if not stored:
        return
    if (rows := rows_of(model, stored)) != model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(rows, mean_resizing=False)
    layers = _layers(model)
    for (path, name), tensor in stored.items():
        layers[path].get_parameter(name).copy_(tensor)
    setattr(model, STORED, True)
