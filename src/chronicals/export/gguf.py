"""GGUF, for llama.cpp and what is built on it: one file, and what shows that it is the model."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from chronicals.export import gguf_file, llama_cpp
from chronicals.export.gguf_tokenizer import Vocabulary, vocabulary_of
from chronicals.export.importance import importance_of
from chronicals.export.proof import (
    ROUNDED_ONCE,
    SUMMED,
    Proof,
    cross_entropy,
    largest_error,
    relative_error,
)
from chronicals.export.source import PROBES, Source, logits_of
from chronicals.export.weight_files import NewTensor, StoredTensor, write_tensors
from chronicals.export.whole import ROUNDED
from chronicals.models.gguf_families import as_computed, family_of
from chronicals.models.gguf_tensors import Restored
from chronicals.quantization import is_linear

ERRORS = {
    "F32": 1e-6,
    "F16": 1e-3,
    "BF16": 4e-3,
    "Q8_0": 0.011,
    "Q5_1": 0.076,
    "Q5_0": 0.086,
    "Q4_1": 0.156,
    "Q4_0": 0.172,
    "MXFP4": 0.23,
    "Q6_K": 0.04,
    "Q5_K": 0.08,
    "Q4_K": 0.16,
    "Q3_K": 0.32,
    "Q2_K": 0.6,
    "IQ4_NL": 0.16,
    "IQ4_XS": 0.16,
    "IQ3_S": 0.32,
    "IQ3_XXS": 0.45,
    "IQ2_S": 0.7,
    "IQ2_XS": 0.75,
    "IQ2_XXS": 0.8,
}
"""Of a dequantised tensor, relative: twice that of rows of Gaussian numbers (a row of few values
may be further off).
"""

BOUNDS = {"f32": 1e-5, "f16": 5e-3, "bf16": 2e-2}
"""Of llama.cpp's logits beside those of torch with the very weights of the file."""

QUANTISED = 0.1
TABULATED = 1e-3
"""The same where llama.cpp quantises activations to 8 bits, and where its activation is a table
(GELU).
"""

OF_ROUNDING = 2.0
BLOCK = 32
"""The same as a multiple of what such rounding of activations does in torch, where a model makes
more of it; and how many elements share a scale."""

BESIDE_TRAINED = {"f32": 1e-4, "f16": 1e-2, "bf16": 5e-2}
"""Of torch's logits with the file's weights beside those of the trained model, by what rounding
the weights changes.
"""

FLOATS = ("F32", "F16", "BF16")
"""Types that are not quantised."""

READER = "gguf"

COMPARED = "logits beside torch with the file's weights"
"""Name of the comparison that tells whether a file is right."""


def write(source: Source, target: Path, kind: str) -> None:
    """Write the file.

    Raises:
        NotExpressible: GGUF has no form for the model or its tokenizer.
        ValueError: the package gguf is missing, or llama.cpp where it quantises.
    """
    planned = gguf_file.plan(source.text_config, source.language, _written_as(source, kind))
    if kind != "f32":
        source.check_kept("F16" if kind == "f16" else "BF16")
    if kind in gguf_file.TYPES:
        gguf_file.write(target, planned, source.language, _vocabulary(source), kind, _about(source))
        return
    if kind in gguf_file.NEED_IMPORTANCE and source.importance is None:
        raise ValueError(
            f"gguf-{kind}: so few bits need to know which columns of a weight matter; give rows "
            "to measure it over "
            "(--importance your.jsonl)"
        )
    llama_cpp.require(f"gguf-{kind}: weights are quantised")
    import gguf

    whole = target.with_name(f"{target.name}.whole")
    gguf_file.write(
        whole,
        planned,
        source.language,
        _vocabulary(source),
        _written_as(source, kind),
        _about(source),
    )
    importance = None
    if source.importance is not None:
        importance = importance_of(
            source.trained_whole(), planned.pieces, source.rows_of(source.importance)
        )
    llama_cpp.quantise(whole, target, int(gguf.LlamaFileType[f"MOSTLY_{kind.upper()}"]), importance)
    whole.unlink()


def _written_as(source: Source, kind: str) -> str:
    """The kind of file that is written by us: what llama.cpp quantises holds the weights as they
    are stored.
    """
    if kind in gguf_file.TYPES:
        return kind
    stored = {tensor.dtype for tensor in source.language.values()}
    return {"BF16": "bf16", "F16": "f16"}.get(stored.pop(), "f32") if len(stored) == 1 else "f32"


def size(source: Source, kind: str) -> int:
    """Bytes of the file's tensors, and of what it is made of where that is a file too."""
    whole = gguf_file.plan(source.text_config, source.language, _written_as(source, kind)).bytes
    return whole if kind in gguf_file.TYPES else 2 * whole


def _vocabulary(source: Source) -> Vocabulary:
    return vocabulary_of(source.tokenizer, source.text_config.vocab_size, source.stops)


def _about(source: Source) -> dict[str, str]:
    """Name and licence, as the base's card has them."""
    found = {
        "name": Path(source.saved.place).name
        if source.saved.base is None
        else Path(source.saved.base).name
    }
    return found | ({"license": source.licence} if source.licence else {})


def prove(source: Source, file: Path, kind: str, proof: Proof) -> None:
    """Read it back, by the package gguf and, where it is there, by llama.cpp."""
    planned = gguf_file.plan(source.text_config, source.language, _written_as(source, kind))
    written = gguf_file.File(file)
    proof.about["types"] = _counted(written)
    _prove_tokenizer(source, written, proof)
    found = written.restored(
        planned.pieces, {name: stored.shape for name, stored in source.language.items()}
    )
    tied = {"lm_head.weight"} if source.text_config.tie_word_embeddings else set()
    proof.equal(
        "every weight is there", READER, sorted(source.language.keys() - tied), sorted(found)
    )
    proof.equal(
        "nothing else is there",
        READER,
        sorted([*planned.types, *planned.extra]),
        sorted(written.tensors),
    )
    if proof.failed:
        return
    for name, values in planned.extra.items():
        proof.equal(name, READER, values.tolist(), written.read(name).tolist())
    source.prove_merged(proof)
    _prove_weights(source, written, found, proof)
    if kind in gguf_file.TYPES:
        _prove_rounded(source, written, planned, proof)
    with tempfile.TemporaryDirectory(dir=file.parent) as place:
        model = _in_torch(source, found, Path(place), proof)
        source.prove_survival(model, proof)
        _prove_beside_trained(source, model, kind, proof)
        if llama_cpp.is_there():
            _prove_ids(source, file, proof)
            _prove_logits(source, file, model, kind, proof)
        else:
            reason = f"{llama_cpp.PACKAGE} is not installed: pip install {llama_cpp.PACKAGE}"
            proof.not_run("ids and logits", "llama.cpp", reason)


def _prove_weights(source: Source, written: gguf_file.File, found: Restored, proof: Proof) -> None:
    """One tensor after the other, by the type that it has in the file."""
    worst: dict[str, tuple[float, str]] = {}
    for name in found:
        kind = written.type_of(found.pieces[name][0].name)
        error = relative_error(found[name], source.trained_language[name].read())
        worst[kind] = max(worst.get(kind, (0.0, name)), (error, name))
    for kind, (error, name) in worst.items():
        proof.bounded(f"weights in {kind}", READER, error, ERRORS.get(kind, 0.0), name)


def _prove_rounded(
    source: Source, written: gguf_file.File, planned: gguf_file.Plan, proof: Proof
) -> None:
    """Every tensor beside the trained weights, summed anew and rounded once to its type."""
    import gguf

    worst: dict[str, tuple[float, float, str]] = {}
    for piece in planned.pieces:
        made = piece.forward(
            [source.trained_language[name].read().float() for name in piece.sources]
        )
        kind = planned.types[piece.name]
        rounded = gguf.quants.dequantize(
            gguf.quants.quantize(made.contiguous().numpy(), kind), kind
        )
        expected = torch.from_numpy(np.array(rounded, np.float32)).view(made.shape)
        error, bound = _difference(written.read(piece.name), expected, kind.name)
        worst[kind.name] = max(worst.get(kind.name, (-1.0, 0.0, "")), (error, bound, piece.name))
    for name, (error, bound, where) in worst.items():
        proof.bounded(f"{ROUNDED}, {name}", READER, error, bound, where)


def _difference(found: torch.Tensor, expected: torch.Tensor, kind: str) -> tuple[float, float]:
    """Of a tensor of a type from what its trained weights become in it, and the bound on that."""
    if kind in FLOATS:
        return relative_error(found, expected), SUMMED if kind == "F32" else ROUNDED_ONCE
    return float((found != expected).float().mean()), ROUNDED_ONCE


def _prove_beside_trained(source: Source, model: Any, kind: str, proof: Proof) -> None:
    """The logits of torch with the file's weights beside the trained model's: bounded where
    nothing is quantised.
    """
    error = largest_error(logits_of(model, source.documents), source.trained_logits)
    if kind in BESIDE_TRAINED:
        proof.bounded(
            "logits beside the trained model's",
            "torch",
            error,
            source.at_least(BESIDE_TRAINED[kind]),
        )
    else:
        proof.reported("logits beside the trained model's", "torch", error)


def _in_torch(source: Source, found: Restored, folder: Path, proof: Proof) -> Any:
    """The model with the very weights of the file; what reads images, which another file has, is
    as it was.
    """
    ours = {source.language[name].name: name for name in found}
    read = [
        NewTensor(stored, "F32", tuple(found.shapes[name]), partial(found.__getitem__, name))
        for stored, name in ours.items()
    ]
    write_tensors(folder / "model.safetensors", [*read, *map(_kept, source.beside_language)])
    config, notes = as_computed(source.config)
    config.dtype = torch.float32
    config.save_pretrained(folder)
    for note in notes:
        proof.not_run("positions", "llama.cpp", note)
    return source.load(folder)


def _kept(stored: StoredTensor) -> NewTensor:
    return NewTensor(stored.name, stored.dtype, stored.shape, lambda: stored)


def _counted(written: gguf_file.File) -> dict[str, int]:
    names = [written.type_of(name) for name in written.tensors]
    return {name: names.count(name) for name in sorted(set(names))}


def _prove_tokenizer(source: Source, written: gguf_file.File, proof: Proof) -> None:
    key = "tokenizer.ggml"
    vocabulary = _vocabulary(source)
    proof.equal("kind of tokenizer", READER, vocabulary.model, written.value(f"{key}.model"))
    proof.equal("splitting of texts", READER, vocabulary.pre, written.value(f"{key}.pre"))
    proof.equal("tokens", READER, vocabulary.tokens, written.value(f"{key}.tokens"))
    proof.equal(
        "types of tokens", READER, vocabulary.types, list(written.value(f"{key}.token_type"))
    )
    proof.equal("merges", READER, vocabulary.merges, written.value(f"{key}.merges") or [])
    scores = np.array(vocabulary.scores, np.float32).tolist()
    proof.equal("scores", READER, scores, written.value(f"{key}.scores") or [])
    blanks = [
        written.value(f"{key}.{name}") for name in ("add_space_prefix", "remove_extra_whitespaces")
    ]
    proof.equal("blanks", READER, [vocabulary.space_prefix, vocabulary.merges_blanks], blanks)
    charsmap = None if vocabulary.charsmap is None else list(vocabulary.charsmap)
    proof.equal("map of characters", READER, charsmap, written.value(f"{key}.precompiled_charsmap"))
    proof.equal(
        "chat template", READER, vocabulary.template, written.value("tokenizer.chat_template")
    )
    named = {
        name: written.value(f"{key}.{gguf_name(name)}_token_id")
        for name in ("bos", "eos", "eot", "unk", "pad")
    }
    proof.equal(
        "special tokens",
        READER,
        vocabulary.special,
        {name: n for name, n in named.items() if n is not None},
    )
    proof.equal(
        "begins texts with BOS",
        READER,
        vocabulary.adds_bos,
        bool(written.value(f"{key}.add_bos_token")),
    )
    proof.equal(
        "ends texts with EOS",
        READER,
        vocabulary.adds_eos,
        bool(written.value(f"{key}.add_eos_token")),
    )
    for note in vocabulary.notes:
        proof.not_run("normalisation", "llama.cpp", note)


def gguf_name(name: str) -> str:
    """Of a special token."""
    return {"unk": "unknown", "pad": "padding"}.get(name, name)


def _prove_ids(source: Source, file: Path, proof: Proof) -> None:
    client = llama_cpp.LlamaCpp(file, vocabulary_only=True)
    texts = list(PROBES)
    expected = [source.tokenizer(text)["input_ids"] for text in texts]
    for text, ids in zip(texts, expected):
        proof.equal(f"ids of {text[:20]!r}…", "llama.cpp", ids, client.ids(text, special=False))
    if source.conversation is not None:
        rendered = source.documents[-1]
        proof.equal("ids of a conversation", "llama.cpp", rendered, client.ids(source.conversation))
    ends = [stop for stop in source.stops if not client.ends(stop)]
    proof.equal("generation ends at", "llama.cpp", [], ends)


def _prove_logits(source: Source, file: Path, model: Any, kind: str, proof: Proof) -> None:
    """Whether the file is right, with its own weights in torch; and what they cost beside the
    trained ones.
    """
    same_weights = logits_of(model, source.documents)
    client = llama_cpp.LlamaCpp(file, tokens=max(map(len, source.documents)) + 1)
    theirs = [torch.from_numpy(client.logits(ids)) for ids in source.documents]
    error = prove_epsilon(source, model, theirs, largest_error(theirs, same_weights), proof)
    with as_rounded(model, kind):
        rounded = largest_error(logits_of(model, source.documents), same_weights)
    bound = max(
        BOUNDS.get(kind, QUANTISED),
        TABULATED if is_tabulated(source.text_config) else 0.0,
        OF_ROUNDING * rounded,
    )
    proof.bounded(COMPARED, "llama.cpp", error, source.at_least(bound))
    trained = source.trained_logits
    losses = [
        sum(
            cross_entropy(logits, ids) * (len(ids) - 1)
            for logits, ids in zip(found, source.documents)
        )
        / sum(len(ids) - 1 for ids in source.documents)
        for found in (trained, theirs)
    ]
    proof.reported(
        "cross-entropy on the proof's texts, beside the trained model's",
        "llama.cpp",
        losses[1] - losses[0],
    )
    agree = [bool(a[-1].argmax() == b[-1].argmax()) for a, b in zip(theirs, trained)]
    proof.reported("texts whose next token is the same", "llama.cpp", sum(agree) / len(agree))


def prove_epsilon(
    source: Source, model: Any, theirs: list[torch.Tensor], error: float, proof: Proof
) -> float:
    """The error of llama.cpp's logits; where it computes a family's norms without their epsilon,
    beside a model without one.

    What leaving it out changes is reported.
    """
    if not family_of(source.text_config).loses_epsilon:
        return error
    with without_epsilon(model):
        bare = largest_error(theirs, logits_of(model, source.documents))
    if bare < error:
        proof.reported("logits that change as the norms' epsilon is left out", "llama.cpp", error)
    return min(bare, error)


@contextmanager
def without_epsilon(model: Any) -> Iterator[None]:
    """Within: norms of the language part have none."""
    norms = [
        module for module in model.get_decoder().modules() if hasattr(module, "variance_epsilon")
    ]
    kept = [(module, module.variance_epsilon) for module in norms]
    for module in norms:
        module.variance_epsilon = 0.0
    try:
        yield
    finally:
        for module, own in kept:
            module.variance_epsilon = own


@contextmanager
def as_rounded(model: Any, kind: str) -> Iterator[None]:
    """Within: inputs of linear layers are rounded as llama.cpp rounds them for weights of a
    kind; GELU is a table of fp16.
    """
    hooks = []
    for module in model.modules():
        if is_linear(module) and kind != "f32":
            hooks.append(
                module.register_forward_pre_hook(
                    lambda _, given: (_rounded(given[0], kind), *given[1:])
                )
            )
        elif "GELU" in type(module).__name__:
            hooks.append(
                module.register_forward_pre_hook(lambda _, given: (_rounded(given[0], "f16"),))
            )
            hooks.append(module.register_forward_hook(lambda _, given, out: _rounded(out, "f16")))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _rounded(x: torch.Tensor, kind: str) -> torch.Tensor:
    """To 16 bits, or to 8 with a scale for each 32 elements."""
    if kind in ("f16", "bf16"):
        return x.to(torch.float16 if kind == "f16" else torch.bfloat16).to(x.dtype)
    if x.shape[-1] % BLOCK:
        return x
    blocks = x.unflatten(-1, (-1, BLOCK))
    scale = (blocks.abs().amax(-1, keepdim=True) / 127).clamp(min=1e-12)
    return ((blocks / scale).round() * scale).flatten(-2)


def is_tabulated(config: Any) -> bool:
    """Whether llama.cpp looks its activation up in a table."""
    return "gelu" in str(
        getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", "")
    )
