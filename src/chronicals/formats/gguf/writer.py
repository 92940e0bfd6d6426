"""Writing a model into a GGUF file, one tensor at a time, by the package gguf."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from chronicals.formats.gguf.configuration import settings_of
from chronicals.formats.gguf.families import Family, family_of
from chronicals.formats.gguf.reader import NotExpressible, require_gguf
from chronicals.formats.gguf.rotation import extra_tensors
from chronicals.formats.gguf.tensors import TensorPiece, pieces_of
from chronicals.formats.gguf.vocabulary import Vocabulary
from chronicals.formats.weight_files import StoredTensor

WEIGHT_TYPES = {
    "f32": "F32",
    "f16": "F16",
    "bf16": "BF16",
    "q8_0": "Q8_0",
    "q5_1": "Q5_1",
    "q5_0": "Q5_0",
    "q4_1": "Q4_1",
    "q4_0": "Q4_0",
    "mxfp4": "MXFP4",
}
"""Kinds of files that are written here, and the type of most of their weights
(``gguf.GGMLQuantizationType``).
"""

FILE_TYPES = {
    "f32": "ALL_F32",
    "f16": "MOSTLY_F16",
    "bf16": "MOSTLY_BF16",
    "q8_0": "MOSTLY_Q8_0",
    "q5_1": "MOSTLY_Q5_1",
    "q5_0": "MOSTLY_Q5_0",
    "q4_1": "MOSTLY_Q4_1",
    "q4_0": "MOSTLY_Q4_0",
    "mxfp4": "MOSTLY_MXFP4_MOE",
}
"""Names of these kinds in ``gguf.LlamaFileType``."""

EXPERTS_KINDS = {"mxfp4": "Q8_0"}
"""Kinds whose type is that of stacked experts alone, and the type of the other weights, as
llama.cpp has them.
"""

LLAMA_CPP_KINDS = (
    "q6_k",
    "q5_k_m",
    "q5_k_s",
    "q4_k_m",
    "q4_k_s",
    "q3_k_l",
    "q3_k_m",
    "q3_k_s",
    "q2_k",
    "iq4_nl",
    "iq4_xs",
    "iq3_m",
    "iq3_s",
    "iq3_xs",
    "iq3_xxs",
    "iq2_m",
    "iq2_s",
    "iq2_xs",
    "iq2_xxs",
)
"""Kinds of files that llama.cpp's own quantiser makes, each of a mixture of types."""

IMPORTANCE_KINDS = ("iq3_xs", "iq3_xxs", "iq2_m", "iq2_s", "iq2_xs", "iq2_xxs")
"""Kinds that it makes only with an importance matrix."""

FULL_PRECISION_ROLES = ("ffn_gate_inp", "ffn_gate_inp_shexp", "attn_sinks")
"""Tensors that are fp32 in every file, as norms, biases and vectors are: routers and attention
sinks.
"""

OF_EXPERTS = "_exps.weight"
"""End of the names of stacked experts in a file."""

HEAD_TYPE = "Q8_0"
"""Type of the head where other weights have fewer bits."""


@dataclass(frozen=True)
class GGUFPlan:
    """Contents of a file that is to be written.

    Attributes:
        pieces: tensors that are made of the model's.
        extra: tensors that are not.
        types: ``gguf.GGMLQuantizationType`` of the pieces, by name in the file.
        bytes: of all tensors.
    """

    config: Any
    family: Family
    settings: dict[str, Any]
    pieces: list[TensorPiece]
    extra: dict[str, np.ndarray]
    types: Mapping[str, Any]
    bytes: int


def plan_gguf(config: Any, tensors: Mapping[str, StoredTensor], kind: str) -> GGUFPlan:
    """Plan how a model is written with weights of a kind of ``WEIGHT_TYPES``.

    Raises:
        NotExpressible: GGUF has no form for it, or it has no experts, and the type is theirs.
        ValueError: the package gguf is missing.
    """
    require_gguf()
    import gguf

    family = family_of(config)
    pieces = pieces_of({name: stored.shape for name, stored in tensors.items()}, config, family)
    missing = {"token_embd.weight", "output_norm.weight"} - {piece.name for piece in pieces}
    if missing:
        raise NotExpressible(f"{', '.join(sorted(missing))}: no tensor of the model is that")
    if kind in EXPERTS_KINDS and not any(piece.name.endswith(OF_EXPERTS) for piece in pieces):
        raise NotExpressible(f"gguf-{kind}: the model has no experts, whose type that is")
    types: dict[str, Any] = {}
    for piece in pieces:
        role = piece.name.split(".")[-2] if "." in piece.name else piece.name
        is_full = len(piece.shape) < 2 or piece.name.endswith((".bias", "_norm.weight"))
        if is_full or role in FULL_PRECISION_ROLES or kind == "f32":
            types[piece.name] = gguf.GGMLQuantizationType.F32
            continue
        is_head = piece.name == "output.weight" or (
            piece.name == "token_embd.weight" and config.tie_word_embeddings
        )
        has_few_bits = kind.startswith(("q4", "q5"))
        name = HEAD_TYPE if is_head and has_few_bits else WEIGHT_TYPES[kind]
        if kind in EXPERTS_KINDS and not piece.name.endswith(OF_EXPERTS):
            name = EXPERTS_KINDS[kind]
        ggml_type = gguf.GGMLQuantizationType[name]
        block, _ = gguf.GGML_QUANT_SIZES[ggml_type]
        # Rows that are no whole blocks are F16.
        is_whole = piece.shape[-1] % block == 0
        types[piece.name] = ggml_type if is_whole else gguf.GGMLQuantizationType.F16
    extra = dict(extra_tensors(config))
    size = sum(bytes_of(piece, types[piece.name]) for piece in pieces)
    size += sum(values.nbytes for values in extra.values())
    settings = settings_of(config, family)
    return GGUFPlan(config, family, settings, pieces, extra, types, size)


def bytes_of(piece: TensorPiece, ggml_type: Any) -> int:
    """Return the bytes of a tensor of a type in the file."""
    import gguf

    rows = int(np.prod(piece.shape[:-1]))
    return rows * int(gguf.quant_shape_to_byte_shape(piece.shape, ggml_type)[-1])


def write_gguf(
    target: Path,
    planned: GGUFPlan,
    tensors: Mapping[str, StoredTensor],
    vocabulary: Vocabulary,
    kind: str,
    about: Mapping[str, str],
) -> None:
    """Write the file; no more than one of its tensors is in memory.

    Args:
        target: file to write.
        planned: of ``plan_gguf``.
        tensors: of the model, by name.
        vocabulary: the tokenizer in GGUF's words.
        kind: of ``WEIGHT_TYPES``.
        about: ``name``, ``license`` and the like, of the model: keys behind ``general``.
    """
    import gguf

    architecture = gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH[planned.family.architecture]]
    writer = gguf.GGUFWriter(target, architecture)
    writer.add_type(gguf.GGUFType.MODEL)
    add_settings(writer, {f"general.{key}": text for key, text in about.items()})
    writer.add_file_type(gguf.LlamaFileType[FILE_TYPES[kind]])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    add_settings(writer, {f"{architecture}.{key}": v for key, v in planned.settings.items()})
    add_settings(writer, vocabulary.settings())
    write_tensors_to(writer, planned.pieces, planned.types, tensors, planned.extra)


def add_settings(writer: Any, settings: Mapping[str, Any]) -> None:
    """Add settings by their whole keys, in the types that llama.cpp expects of such values."""
    for key, value in settings.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)


def write_tensors_to(
    writer: Any,
    pieces: list[TensorPiece],
    types: Mapping[str, Any],
    tensors: Mapping[str, StoredTensor],
    extra: Mapping[str, np.ndarray],
) -> None:
    """Write the file of a ``GGUFWriter`` that has its settings, and close it."""
    import gguf

    for piece in pieces:
        ggml_type = types[piece.name]
        # Quantised and BF16 tensors are bytes to the writer, whose shape is that of the bytes.
        stored_as = {"F32": np.float32, "F16": np.float16}.get(ggml_type.name, np.uint8)
        shape = piece.shape
        if stored_as == np.uint8:
            shape = gguf.quant_shape_to_byte_shape(piece.shape, ggml_type)
        writer.add_tensor_info(
            piece.name, shape, np.dtype(stored_as), bytes_of(piece, ggml_type), raw_dtype=ggml_type
        )
    for name, values in extra.items():
        writer.add_tensor_info(name, values.shape, values.dtype, values.nbytes)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for piece in pieces:
        sources = [tensors[name].read().float() for name in piece.sources]
        values = piece.forward(sources).contiguous().numpy()
        writer.write_tensor_data(gguf.quants.quantize(values, types[piece.name]))
    for values in extra.values():
        writer.write_tensor_data(values)
    writer.close()
