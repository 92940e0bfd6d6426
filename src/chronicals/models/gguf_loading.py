"""Loads a model from a GGUF file; its linear layers keep the file's quantised blocks.

Tensors are mapped by the inverse of the tables that write such files (``formats/gguf/tensors.py``).
llama.cpp stores the rows of q and k in another order for some families. They are permuted as whole
rows of blocks, so no bit of a block changes. All other weights (embedding, head, norms, stacked
experts) and types without a kernel are dequantised once while loading; the log names them.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from chronicals.formats.gguf.configuration import config_of
from chronicals.formats.gguf.families import family_of
from chronicals.formats.gguf.reader import GGUFFile
from chronicals.formats.gguf.rotation import extra_tensors
from chronicals.formats.gguf.tensors import RestoredTensors, TensorPiece, pieces_of
from chronicals.kernels.gguf_blocks import GGUF_KINDS
from chronicals.models.four_bits import linear_layers
from chronicals.quantization import Blocks

logger = logging.getLogger(__name__)

GGUF_FILE = "_chronicals_gguf"
"""Attribute of a model loaded from a GGUF file: the file's name and SHA-256."""

UNQUANTISED_TYPES = ("F32", "F16", "BF16")


def load_gguf(path: Path, dtype: torch.dtype, packed: bool = True) -> Any:
    """Load a causal language model into host memory, in evaluation mode.

    Args:
        path: a GGUF file.
        dtype: dtype of weights without blocks and of dequantised values.
        packed: keep the file's blocks in linear layers; if False, all weights are dequantised.

    Raises:
        NotExpressible: the architecture, a setting or a tensor is not supported; the message names
            it.
        ValueError: the package gguf is missing, or the file is damaged.
    """
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    file = GGUFFile(path)
    config = config_of(file)
    with no_init_weights():  # pages are allocated as they are written
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.tie_weights()
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    pieces = pieces_of(shapes, config, family_of(config))
    _check_tensors(file, pieces, {name for name, _ in extra_tensors(config)})
    by_source = {piece.sources[0]: piece for piece in pieces if len(piece.sources) == 1}
    layers = {}
    for path_in_model, linear in linear_layers(model).items() if packed else ():
        piece = by_source.get(f"{path_in_model}.weight")
        if piece is None or file.type_of(piece.name) not in GGUF_KINDS:
            continue
        layers[path_in_model] = piece
        # Whole rows of blocks are put into the model's order, so no bit of a block changes.
        ((_, _, rows),) = piece.backward(file.blocks(piece.name))
        weight = Blocks.of(rows.contiguous(), file.type_of(piece.name), dtype)
        layer = weight.layer(linear.bias)
        model.set_submodule(path_in_model, layer.train(linear.training))
    restored = RestoredTensors(pieces, shapes, file.read)
    assert set(restored) == shapes.keys(), "a parameter would have no value"
    with torch.no_grad():
        for name in restored:
            if name.removesuffix(".weight") not in layers:
                model.get_parameter(name).copy_(restored[name])
    _report(file, pieces, layers, dtype)
    with path.open("rb") as stored:
        digest = hashlib.file_digest(stored, "sha256").hexdigest()
    setattr(model, GGUF_FILE, {"file": path.name, "sha256": digest})
    return model.eval()


def _check_tensors(file: GGUFFile, pieces: list[TensorPiece], extra: set[str]) -> None:
    """Raise ValueError if the file has other tensors than the model, or tensors of other shapes."""
    expected = {piece.name: piece.shape for piece in pieces}
    missing = sorted(expected.keys() - file.tensors.keys())
    unknown = sorted(file.tensors.keys() - expected.keys() - extra)
    if missing or unknown:
        differences = []
        if missing:
            differences.append(f"lacks {', '.join(missing[:3])}")
        if unknown:
            differences.append(f"has {', '.join(unknown[:3])}")
        raise ValueError(
            f"{file.path}: {' and '.join(differences)}, otherwise than the model that its settings "
            "describe: it is cut or of another version of the architecture; download it again, or "
            "take the model's own safetensors"
        )
    for name, shape in expected.items():
        stored = file.shape_of(name)
        if stored != tuple(shape):
            raise ValueError(
                f"{file.path}: {name} is {list(stored)}, by its settings {list(shape)}; download "
                "it again"
            )


def _report(
    file: GGUFFile,
    pieces: list[TensorPiece],
    layers: Mapping[str, TensorPiece],
    dtype: torch.dtype,
) -> None:
    """Log the types of layers that keep their blocks, and the tensors that were dequantised."""
    types = [file.type_of(piece.name) for piece in layers.values()]
    counts = ", ".join(f"{types.count(name)} in {name}" for name in sorted(set(types)))
    logger.info(
        "%s: %d linear layers stay as they are (%s)",
        file.path.name,
        len(types),
        counts or "none is quantised",
    )
    packed = {piece.name for piece in layers.values()}
    dequantised: dict[str, None] = {}
    for piece in pieces:
        kind = file.type_of(piece.name)
        if piece.name not in packed and kind not in UNQUANTISED_TYPES:
            dequantised[f"{re.sub(r'[.][0-9]+[.]', '.*.', piece.name)} ({kind})"] = None
    if dequantised:
        logger.info(
            "%s: dequantised once, to %s: %s",
            file.path.name,
            str(dtype).removeprefix("torch."),
            ", ".join(dequantised),
        )
