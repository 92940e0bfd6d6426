"""GGUF, for llama.cpp and the programs that use it: the file of a model or of its language part."""

from __future__ import annotations

from pathlib import Path

from chronicals.export import llama_cpp
from chronicals.export.importance import importance_of
from chronicals.export.source import Source
from chronicals.formats.gguf.tokenizer import vocabulary_of
from chronicals.formats.gguf.vocabulary import Vocabulary
from chronicals.formats.gguf.writer import (
    IMPORTANCE_KINDS,
    WEIGHT_TYPES,
    GGUFPlan,
    plan_gguf,
    write_gguf,
)


def write(source: Source, target: Path, kind: str) -> None:
    """Write the file.

    Raises:
        NotExpressible: GGUF has no form for the model or its tokenizer.
        ValueError: the package gguf is missing, or llama.cpp where it quantises.
    """
    planned = plan_of(source, kind)
    if kind != "f32":
        source.check_kept("F16" if kind == "f16" else "BF16")
    if kind in WEIGHT_TYPES:
        _write_ours(source, target, planned, kind)
        return
    if kind in IMPORTANCE_KINDS and source.importance is None:
        raise ValueError(
            f"gguf-{kind}: so few bits need to know which columns of a weight matter; give rows "
            "to measure it over (--importance your.jsonl)"
        )
    llama_cpp.require(f"gguf-{kind}: weights are quantised")
    import gguf

    unquantised = target.with_name(f"{target.name}.whole")
    _write_ours(source, unquantised, planned, own_kind(source, kind))
    importance = None
    if source.importance is not None:
        rows = source.rows_of(source.importance)
        importance = importance_of(source.trained_whole(), planned.pieces, rows)
    file_type = int(gguf.LlamaFileType[f"MOSTLY_{kind.upper()}"])
    llama_cpp.quantise(unquantised, target, file_type, importance)
    unquantised.unlink()


def _write_ours(source: Source, target: Path, planned: GGUFPlan, kind: str) -> None:
    """Write a file of a kind of ``WEIGHT_TYPES``, with the model's name and licence."""
    saved = source.saved
    about = {"name": Path(saved.place if saved.base is None else saved.base).name}
    if source.licence:
        about["license"] = source.licence
    write_gguf(target, planned, source.language, vocabulary_for(source), kind, about)


def plan_of(source: Source, kind: str) -> GGUFPlan:
    """Plan the file that is written here: of the kind itself, or the one llama.cpp quantises."""
    return plan_gguf(source.text_config, source.language, own_kind(source, kind))


def own_kind(source: Source, kind: str) -> str:
    """Return the kind of the file that is written here.

    A file that llama.cpp quantises is made of one with the weights as they are stored.
    """
    if kind in WEIGHT_TYPES:
        return kind
    dtypes = {tensor.dtype for tensor in source.language.values()}
    if len(dtypes) > 1:
        return "f32"
    return {"BF16": "bf16", "F16": "f16"}.get(dtypes.pop(), "f32")


def size(source: Source, kind: str) -> int:
    """Return the bytes of the file's tensors, with those of the file that it is made of, if any."""
    own_bytes = plan_of(source, kind).bytes
    return own_bytes if kind in WEIGHT_TYPES else 2 * own_bytes


def vocabulary_for(source: Source) -> Vocabulary:
    """Describe the model's tokenizer in the words of GGUF."""
    return vocabulary_of(source.tokenizer, source.text_config.vocab_size, source.stops)
