"""Writing a model into a GGUF file, a tensor at a time; ``File`` reads one back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from chronicals.export.gguf_tokenizer import Vocabulary
from chronicals.export.weight_files import StoredTensor
from chronicals.models.gguf_families import (
    Family,
    NotExpressible,
    Settings,
    extra_tensors,
    family_of,
    settings_of,
)
from chronicals.models.gguf_reader import File, require_gguf
from chronicals.models.gguf_tensors import Piece, pieces_of

__all__ = ["File", "Plan", "fill", "plan", "require_gguf", "write"]

TYPES = {
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
"""Names of files by the type of most of their weights, in ``gguf.GGMLQuantizationType``."""

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

EXPERTS_ALONE = {"mxfp4": "Q8_0"}
"""Names of files whose type is that of stacked experts, and the type of their other weights, as
llama.cpp has them."""

BY_LLAMA_CPP = (
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
"""Names of files that llama.cpp's own quantiser makes, of a mixture of types each."""

NEED_IMPORTANCE = ("iq3_xs", "iq3_xxs", "iq2_m", "iq2_s", "iq2_xs", "iq2_xxs")
"""Those that it makes with an importance matrix alone."""

OF_THE_HEAD = "Q8_0"
"""What the head is quantised to where the rest has fewer bits."""


@dataclass(frozen=True)
class Plan:
    """What a file will hold.

    Attributes:
        pieces: its tensors that are made of the model's.
        extra: those that are not.
        types: of each tensor, by name in the file.
        bytes: of all tensors.
    """

    config: Any
    family: Family
    settings: Settings
    pieces: list[Piece]
    extra: dict[str, np.ndarray]
    types: Mapping[str, Any]
    bytes: int


def plan(config: Any, tensors: Mapping[str, StoredTensor], kind: str) -> Plan:
    """How a model is written with weights of a type of ``TYPES``.

    Raises:
        NotExpressible: GGUF has no form for it, or it has no experts, and the type is theirs.
        ValueError: the package gguf is missing.
    """
    require_gguf()
    import gguf

    family = family_of(config)
    pieces = pieces_of({name: stored.shape for name, stored in tensors.items()}, config, family)
    if missing := {"token_embd.weight", "output_norm.weight"} - {piece.name for piece in pieces}:
        raise NotExpressible(f"{', '.join(sorted(missing))}: no tensor of the model is that")
    if kind in EXPERTS_ALONE and not any(_is_of_experts(piece) for piece in pieces):
        raise NotExpressible(f"gguf-{kind}: the model has no experts, whose type that is")
    types = {piece.name: _type_of(piece, kind, config) for piece in pieces}
    extra = dict(extra_tensors(config))
    size = sum(
        gguf.quant_shape_to_byte_shape(piece.shape, types[piece.name])[-1] * _rows(piece.shape)
        for piece in pieces
    )
    return Plan(
        config,
        family,
        settings_of(config, family),
        pieces,
        extra,
        types,
        size + sum(x.nbytes for x in extra.values()),
    )


def _is_of_experts(piece: Piece) -> bool:
    return piece.name.endswith("_exps.weight")


def _rows(shape: tuple[int, ...]) -> int:
    return int(np.prod(shape[:-1]))


def _type_of(piece: Piece, kind: str, config: Any) -> Any:
    """The type of a tensor in the file: its rows must be whole blocks, or it is F16."""
    import gguf

    if piece.is_full or kind == "f32":
        return gguf.GGMLQuantizationType.F32
    head = piece.name == "output.weight" or (
        piece.name == "token_embd.weight" and config.tie_word_embeddings
    )
    name = OF_THE_HEAD if head and kind.startswith(("q4", "q5")) else TYPES[kind]
    if kind in EXPERTS_ALONE and not _is_of_experts(piece):
        name = EXPERTS_ALONE[kind]
    chosen = gguf.GGMLQuantizationType[name]
    block, _ = gguf.GGML_QUANT_SIZES[chosen]
    return chosen if piece.shape[-1] % block == 0 else gguf.GGMLQuantizationType.F16


def write(
    target: Path,
    planned: Plan,
    tensors: Mapping[str, StoredTensor],
    vocabulary: Vocabulary,
    kind: str,
    about: Mapping[str, str],
) -> None:
    """Write the file; of weights no more than one tensor of it is in memory.

    Args:
        tensors: of the model, where they are stored.
        about: ``name``, ``license`` and the like, by gguf's method without ``add_``.
    """
    import gguf

    writer = gguf.GGUFWriter(
        target, gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH[planned.family.architecture]]
    )
    writer.add_type(gguf.GGUFType.MODEL)
    for key, text in about.items():
        getattr(writer, f"add_{key}")(text)
    writer.add_file_type(gguf.LlamaFileType[FILE_TYPES[kind]])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for key, value in planned.settings.items():
        getattr(writer, f"add_{key}")(
            gguf.RopeScalingType(value) if key == "rope_scaling_type" else value
        )
    _add_vocabulary(writer, vocabulary)
    fill(writer, planned.pieces, planned.types, tensors, planned.extra)


def fill(
    writer: Any,
    pieces: list[Piece],
    types: Mapping[str, Any],
    tensors: Mapping[str, StoredTensor],
    extra: Mapping[str, np.ndarray],
) -> None:
    """Write everything to the file of a ``GGUFWriter`` that has its settings, and close it."""
    import gguf

    for piece in pieces:
        chosen = types[piece.name]
        shape = (
            gguf.quant_shape_to_byte_shape(piece.shape, chosen)
            if _is_packed(chosen)
            else piece.shape
        )
        nbytes = gguf.quant_shape_to_byte_shape(piece.shape, chosen)[-1] * _rows(piece.shape)
        writer.add_tensor_info(
            piece.name, shape, np.dtype(_stored_as(chosen)), nbytes, raw_dtype=chosen
        )
    for name, values in extra.items():
        writer.add_tensor_info(name, values.shape, values.dtype, values.nbytes)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for piece in pieces:
        made = (
            piece.forward([tensors[name].read().float() for name in piece.sources])
            .contiguous()
            .numpy()
        )
        writer.write_tensor_data(gguf.quants.quantize(made, types[piece.name]))
    for values in extra.values():
        writer.write_tensor_data(values)
    writer.close()


def _is_packed(chosen: Any) -> bool:
    return chosen.name not in ("F32", "F16")


def _stored_as(chosen: Any) -> Any:
    return {"F32": np.float32, "F16": np.float16}.get(chosen.name, np.uint8)


def _add_vocabulary(writer: Any, vocabulary: Vocabulary) -> None:
    writer.add_tokenizer_model(vocabulary.model)
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    if vocabulary.scores:
        writer.add_token_scores(vocabulary.scores)
    if vocabulary.merges:
        writer.add_token_merges(vocabulary.merges)
    for name, number in vocabulary.special.items():
        getattr(writer, f"add_{name}_token_id")(number)
    writer.add_add_bos_token(vocabulary.adds_bos)
    writer.add_add_eos_token(vocabulary.adds_eos)
    if vocabulary.space_prefix is not None:
        writer.add_add_space_prefix(vocabulary.space_prefix)
    if vocabulary.merges_blanks is not None:
        writer.add_remove_extra_whitespaces(vocabulary.merges_blanks)
    if vocabulary.charsmap is not None:
        writer.add_precompiled_charsmap(vocabulary.charsmap)
    if vocabulary.template:
        writer.add_chat_template(vocabulary.template)
