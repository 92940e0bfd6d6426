"""A model out of a GGUF file, whose linear layers keep their weights in the file's blocks.

Every tensor finds its place by the tables that write such files, inverted (``gguf_tensors.py``).
Rows of q and k that llama.cpp has in another order are moved whole, with all their blocks, so that
not a bit of them changes. What is no plain linear layer of a decoder layer (embedding, head, norms,
stacked experts), and types without a kernel, are dequantised once; the log names them.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from chronicals.kernels.gguf_blocks import KINDS
from chronicals.models.four_bits import linear_layers
from chronicals.models.gguf_config import config_of
from chronicals.models.gguf_families import extra_tensors, family_of
from chronicals.models.gguf_reader import File, fingerprint
from chronicals.models.gguf_tensors import Piece, pieces_of
from chronicals.quantization import Blocks

logger = logging.getLogger(__name__)

GGUF_FILE = "_chronicals_gguf"
"""Attribute of a model that was loaded from a GGUF file: its name and SHA-256."""

WHOLE = ("F32", "F16", "BF16")
"""Types that are not quantised."""


def load_gguf(path: Path, dtype: torch.dtype, packed: bool = True) -> Any:
    """A causal language model in host memory, in evaluation mode.

    Args:
        dtype: of what is not in blocks, and of what blocks are dequantised to.
        packed: layers keep the file's blocks; otherwise all is dequantised.

    Raises:
        NotExpressible: it is of an architecture, or has settings or tensors, that are not proved
            here; the message names them.
        ValueError: the package gguf is missing, or the file is damaged.
    """
    file = File(path)
    config = config_of(file)
    model = _empty(config, dtype)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    pieces = pieces_of(shapes, config, family_of(config))
    _check_tensors(file, pieces, {name for name, _ in extra_tensors(config)})
    layers = _packable(model, file, pieces) if packed else {}
    for path_in_model, piece in layers.items():
        _put(model, path_in_model, file, piece, dtype)
    restored = file.restored(pieces, shapes)
    assert set(restored) == shapes.keys(), "a parameter would have no value"
    with torch.no_grad():
        for name in restored:
            if name.removesuffix(".weight") not in layers:
                model.get_parameter(name).copy_(restored[name])
    _report(file, pieces, layers, dtype)
    setattr(model, GGUF_FILE, fingerprint(path))
    return model.eval()


def _empty(config: Any, dtype: torch.dtype) -> Any:
    """The model with memory that is not written, and so not taken, until a weight is."""
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    with no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.tie_weights()
    return model


def _check_tensors(file: File, pieces: list[Piece], extra: set[str]) -> None:
    """Raises ValueError where the file has other tensors than the model, or of other shapes."""
    expected = {piece.name: piece.shape for piece in pieces}
    missing = sorted(expected.keys() - file.tensors.keys())
    unknown = sorted(file.tensors.keys() - expected.keys() - extra)
    if missing or unknown:
        named = [f"lacks {', '.join(missing[:3])}"] * bool(missing) + [
            f"has {', '.join(unknown[:3])}"
        ] * bool(unknown)
        raise ValueError(
            f"{file.path}: {' and '.join(named)}, otherwise than the model that its settings "
            "describe: it is cut or of another "
            "version of the architecture; download it again, or take the model's own safetensors"
        )
    for name, shape in expected.items():
        if file.shape_of(name) != tuple(shape):
            there = list(file.shape_of(name))
            raise ValueError(
                f"{file.path}: {name} is {there}, by its settings {list(shape)}; download it again"
            )


def _packable(model: Any, file: File, pieces: list[Piece]) -> dict[str, Piece]:
    """Plain linear layers of decoder layers whose weight the file has in blocks that there is a
    kernel for, by their paths.
    """
    of = {piece.sources[0]: piece for piece in pieces if len(piece.sources) == 1}
    found = {path: of[f"{path}.weight"] for path in linear_layers(model) if f"{path}.weight" in of}
    return {path: piece for path, piece in found.items() if file.type_of(piece.name) in KINDS}


def _put(model: Any, path: str, file: File, piece: Piece, dtype: torch.dtype) -> None:
    """A layer over the file's blocks in place of a plain one; whole rows are put in the model's
    order.
    """
    linear: nn.Linear = model.get_submodule(path)
    ((_, _, rows),) = piece.backward(file.blocks(piece.name))
    weight = Blocks.of(rows.contiguous(), file.type_of(piece.name), dtype)
    layer = weight.layer(linear.bias)
    model.set_submodule(path, layer.train(linear.training))


def _report(
    file: File, pieces: list[Piece], layers: Mapping[str, Piece], dtype: torch.dtype
) -> None:
    kept = [file.type_of(piece.name) for piece in layers.values()]
    counted = ", ".join(f"{kept.count(kind)} in {kind}" for kind in sorted(set(kept)))
    logger.info(
        "%s: %d linear layers stay as they are (%s)",
        file.path.name,
        len(kept),
        counted or "none is quantised",
    )
    inside = {piece.name for piece in layers.values()}
    others: dict[str, None] = {}
    for piece in pieces:
        if piece.name not in inside and (kind := file.type_of(piece.name)) not in WHOLE:
            others[f"{re.sub(r'[.][0-9]+[.]', '.*.', piece.name)} ({kind})"] = None
    if others:
        logger.info(
            "%s: dequantised once, to %s: %s",
            file.path.name,
            str(dtype).removeprefix("torch."),
            ", ".join(others),
        )
