"""Proof that a GGUF file is the trained model: read back by the package gguf, and by llama.cpp.

Errors are relative, of Frobenius norms. llama.cpp's logits are compared with those of torch with
the weights of the file, so that a bound tells a wrong file from a coarse one.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from chronicals.export import gguf, llama_cpp
from chronicals.export.proof import (
    ROUNDED_ONCE,
    SUMMED,
    Proof,
    cross_entropy,
    largest_error,
    relative_error,
)
from chronicals.export.source import PROBES, Source, logits_of
from chronicals.export.whole import ROUNDED
from chronicals.formats.gguf.families import family_of
from chronicals.formats.gguf.reader import GGUFFile
from chronicals.formats.gguf.rotation import as_computed
from chronicals.formats.gguf.tensors import RestoredTensors
from chronicals.formats.gguf.vocabulary import read_vocabulary
from chronicals.formats.gguf.writer import WEIGHT_TYPES, GGUFPlan
from chronicals.formats.weight_files import NewTensor, StoredTensor, write_tensors
from chronicals.quantization import PackedLinear

TYPE_ERRORS = {
    "F32": 1e-6,
    "F16": 1e-3,
    "BF16": 4e-3,
    "Q8_0": 0.011,
    "Q5_1": 0.076,
    "Q5_0": 0.086,
    "Q4_1": 0.156,
    "Q4_0": 0.172,
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
"""Bounds on the error of a dequantised tensor, by its type: twice that of Gaussian rows, since
rows with few values may be further off.
"""

LOGIT_BOUNDS = {"f32": 1e-5, "f16": 5e-3, "bf16": 2e-2}
"""Bounds on the error of llama.cpp's logits beside torch's with the weights of the file."""

QUANTISED_LOGIT_BOUND = 0.1
"""The same bound where llama.cpp quantises activations to 8 bits."""

TABLE_LOGIT_BOUND = 1e-3
"""The same bound where llama.cpp's activation is a table of fp16 (GELU)."""

ROUNDING_FACTOR = 2.0
"""The bound is at least this multiple of the change that rounding activations alike makes in torch."""

ACTIVATION_BLOCK = 32
"""Elements of an activation that share a scale where llama.cpp rounds it to 8 bits."""

TRAINED_LOGIT_BOUNDS = {"f32": 1e-4, "f16": 1e-2, "bf16": 5e-2}
"""Bounds on the error of torch's logits with the file's weights beside the trained model's."""

FLOAT_TYPES = ("F32", "F16", "BF16")
"""Types that are not quantised."""

GGUF_READER = "gguf"
"""Name of the package gguf as a client in proofs."""

FILE_LOGITS_CHECK = "logits beside torch with the file's weights"
"""Name of the check that tells whether a file is right."""


def prove(source: Source, file: Path, kind: str, proof: Proof) -> None:
    """Read the file back, by the package gguf and, if it is installed, by llama.cpp."""
    planned = gguf.plan_of(source, kind)
    written = GGUFFile(file)
    types = [written.type_of(name) for name in written.tensors]
    proof.about["types"] = {name: types.count(name) for name in sorted(set(types))}
    _prove_tokenizer(source, written, proof)
    shapes = {name: stored.shape for name, stored in source.language.items()}
    restored = RestoredTensors(planned.pieces, shapes, written.read)
    tied = {"lm_head.weight"} if source.text_config.tie_word_embeddings else set()
    weights = sorted(source.language.keys() - tied)
    proof.equal("every weight is there", GGUF_READER, weights, sorted(restored))
    tensors = sorted([*planned.types, *planned.extra])
    proof.equal("nothing else is there", GGUF_READER, tensors, sorted(written.tensors))
    if proof.failed:
        return
    for name, values in planned.extra.items():
        proof.equal(name, GGUF_READER, values.tolist(), written.read(name).tolist())
    source.prove_merged(proof)
    prove_weights(source.trained_language, restored, written, proof)
    if kind in WEIGHT_TYPES:
        _prove_rounded(source, written, planned, proof)
    with tempfile.TemporaryDirectory(dir=file.parent) as place:
        model = _load_restored(source, restored, Path(place), proof)
        source.prove_survival(model, proof)
        _prove_beside_trained(source, model, kind, proof)
        if llama_cpp.is_there():
            _prove_ids(source, file, proof)
            _prove_logits(source, file, model, kind, proof)
        else:
            reason = f"{llama_cpp.PACKAGE} is not installed: pip install {llama_cpp.PACKAGE}"
            proof.not_run("ids and logits", "llama.cpp", reason)


def prove_weights(
    expected: dict[str, StoredTensor], restored: RestoredTensors, written: GGUFFile, proof: Proof
) -> None:
    """Compare one tensor of the model after the other, by the type that it has in the file."""
    worst: dict[str, tuple[float, str]] = {}
    for name in restored:
        kind = written.type_of(restored.pieces[name][0].name)
        error = relative_error(restored[name], expected[name].read())
        worst[kind] = max(worst.get(kind, (0.0, name)), (error, name))
    for kind, (error, name) in worst.items():
        bound = TYPE_ERRORS.get(kind, 0.0)
        proof.bounded(f"weights in {kind}", GGUF_READER, error, bound, name)


def _prove_rounded(source: Source, written: GGUFFile, planned: GGUFPlan, proof: Proof) -> None:
    """Compare every tensor with the trained weights, summed anew and rounded once to its type."""
    import gguf as package

    worst: dict[str, tuple[float, float, str]] = {}
    for piece in planned.pieces:
        trained = [source.trained_language[name].read().float() for name in piece.sources]
        values = piece.forward(trained).contiguous()
        kind = planned.types[piece.name]
        rounded = package.quants.dequantize(package.quants.quantize(values.numpy(), kind), kind)
        expected = torch.from_numpy(np.array(rounded, np.float32)).view(values.shape)
        tensor = written.read(piece.name)
        if kind.name in FLOAT_TYPES:
            error = relative_error(tensor, expected)
            bound = SUMMED if kind.name == "F32" else ROUNDED_ONCE
        else:
            error = float((tensor != expected).float().mean())
            bound = ROUNDED_ONCE
        worst[kind.name] = max(worst.get(kind.name, (-1.0, 0.0, "")), (error, bound, piece.name))
    for type_name, (error, bound, name) in worst.items():
        proof.bounded(f"{ROUNDED}, {type_name}", GGUF_READER, error, bound, name)


def _prove_beside_trained(source: Source, model: Any, kind: str, proof: Proof) -> None:
    """Compare torch's logits with the trained model's; quantised ones have no bound."""
    name = "logits beside the trained model's"
    error = largest_error(logits_of(model, source.documents), source.trained_logits)
    if kind in TRAINED_LOGIT_BOUNDS:
        proof.bounded(name, "torch", error, source.at_least(TRAINED_LOGIT_BOUNDS[kind]))
    else:
        proof.reported(name, "torch", error)


def _load_restored(source: Source, restored: RestoredTensors, folder: Path, proof: Proof) -> Any:
    """Load the model with the weights of the file; the part that reads images is unchanged."""
    tensors = []
    for name in restored:
        stored_name = source.language[name].name
        read = partial(restored.__getitem__, name)
        tensors.append(NewTensor(stored_name, "F32", tuple(restored.shapes[name]), read))
    for stored in source.beside_language:
        copied = partial(_unchanged, stored)
        tensors.append(NewTensor(stored.name, stored.dtype, stored.shape, copied))
    write_tensors(folder / "model.safetensors", tensors)
    config, notes = as_computed(source.config)
    config.dtype = torch.float32
    config.save_pretrained(folder)
    for note in notes:
        proof.not_run("positions", "llama.cpp", note)
    return source.load(folder)


def _unchanged(stored: StoredTensor) -> StoredTensor:
    return stored


def _prove_tokenizer(source: Source, written: GGUFFile, proof: Proof) -> None:
    """Compare the file's settings of the tokenizer with those that the tokenizer gives."""
    expected = gguf.vocabulary_for(source)
    read = read_vocabulary(written)
    scores = np.array(expected.scores, np.float32).tolist()
    charsmaps = [None if x.charsmap is None else list(x.charsmap) for x in (expected, read)]
    blanks = [[x.space_prefix, x.merges_blanks] for x in (expected, read)]
    compared: list[tuple[str, Any, Any]] = [
        ("kind of tokenizer", expected.model, read.model),
        ("splitting of texts", expected.pre, read.pre),
        ("tokens", expected.tokens, read.tokens),
        ("types of tokens", expected.types, read.types),
        ("merges", expected.merges, read.merges),
        ("scores", scores, read.scores),
        ("blanks", blanks[0], blanks[1]),
        ("map of characters", charsmaps[0], charsmaps[1]),
        ("chat template", expected.template, read.template),
        ("special tokens", expected.special, read.special),
        ("begins texts with BOS", expected.adds_bos, bool(read.adds_bos)),
        ("ends texts with EOS", expected.adds_eos, bool(read.adds_eos)),
    ]
    for name, ours, theirs in compared:
        proof.equal(name, GGUF_READER, ours, theirs)
    for note in expected.notes:
        proof.not_run("normalisation", "llama.cpp", note)


def _prove_ids(source: Source, file: Path, proof: Proof) -> None:
    """Compare llama.cpp's token ids with the tokenizer's."""
    client = llama_cpp.LlamaCpp(file, vocabulary_only=True)
    for text in PROBES:
        ids = source.tokenizer(text)["input_ids"]
        proof.equal(f"ids of {text[:20]!r}…", "llama.cpp", ids, client.ids(text, special=False))
    if source.conversation is not None:
        ids = source.documents[-1]
        proof.equal("ids of a conversation", "llama.cpp", ids, client.ids(source.conversation))
    not_ends = [stop for stop in source.stops if not client.ends(stop)]
    proof.equal("generation ends at", "llama.cpp", [], not_ends)


def _prove_logits(source: Source, file: Path, model: Any, kind: str, proof: Proof) -> None:
    """Compare llama.cpp's logits with torch's, and report the cost beside the trained model.

    Args:
        model: with the weights of the file.
    """
    same_weights = logits_of(model, source.documents)
    client = llama_cpp.LlamaCpp(file, tokens=max(map(len, source.documents)) + 1)
    theirs = [torch.from_numpy(client.logits(ids)) for ids in source.documents]
    error = prove_epsilon(source, model, theirs, largest_error(theirs, same_weights), proof)
    with as_rounded(model, kind):
        rounded = largest_error(logits_of(model, source.documents), same_weights)
    bound = max(
        LOGIT_BOUNDS.get(kind, QUANTISED_LOGIT_BOUND),
        TABLE_LOGIT_BOUND if is_tabulated(source.text_config) else 0.0,
        ROUNDING_FACTOR * rounded,
    )
    proof.bounded(FILE_LOGITS_CHECK, "llama.cpp", error, source.at_least(bound))
    trained = source.trained_logits
    cost = _mean_loss(theirs, source.documents) - _mean_loss(trained, source.documents)
    proof.reported(
        "cross-entropy on the proof's texts, beside the trained model's", "llama.cpp", cost
    )
    agree = [bool(a[-1].argmax() == b[-1].argmax()) for a, b in zip(theirs, trained)]
    proof.reported("texts whose next token is the same", "llama.cpp", sum(agree) / len(agree))


def _mean_loss(logits: list[torch.Tensor], documents: list[list[int]]) -> float:
    """Return the cross-entropy of a token after the first, nats, over all documents."""
    counts = [len(ids) - 1 for ids in documents]
    losses = [cross_entropy(x, ids) for x, ids in zip(logits, documents)]
    return sum(loss * count for loss, count in zip(losses, counts)) / sum(counts)


def prove_epsilon(
    source: Source, model: Any, theirs: list[torch.Tensor], error: float, proof: Proof
) -> float:
    """Return the error of llama.cpp's logits, beside norms without epsilon where it drops it.

    For a family whose norms some versions of llama.cpp compute without their epsilon, the change
    by that is reported, and the smaller error is returned.
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
    """Set the epsilon of the language part's norms to 0 inside the context."""
    epsilons = {
        module: module.variance_epsilon
        for module in model.get_decoder().modules()
        if hasattr(module, "variance_epsilon")
    }
    for module in epsilons:
        module.variance_epsilon = 0.0
    try:
        yield
    finally:
        for module, epsilon in epsilons.items():
            module.variance_epsilon = epsilon


@contextmanager
def as_rounded(model: Any, kind: str) -> Iterator[None]:
    """Round activations inside the context as llama.cpp does for weights of a kind.

    The inputs of linear layers are rounded to 16 or 8 bits; GELU is a table of fp16, whose input
    and output are rounded.
    """

    def round_input(_: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (_rounded(inputs[0], kind), *inputs[1:])

    def round_input_of_table(_: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (_rounded(inputs[0], "f16"),)

    def round_output_of_table(_: Any, inputs: Any, out: torch.Tensor) -> torch.Tensor:
        return _rounded(out, "f16")

    hooks = []
    for module in model.modules():
        if isinstance(module, torch.nn.Linear | PackedLinear) and kind != "f32":
            hooks.append(module.register_forward_pre_hook(round_input))
        elif "GELU" in type(module).__name__:
            hooks.append(module.register_forward_pre_hook(round_input_of_table))
            hooks.append(module.register_forward_hook(round_output_of_table))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _rounded(x: torch.Tensor, kind: str) -> torch.Tensor:
    """Round to 16 bits, or to 8 bits with a scale for each block of elements."""
    if kind in ("f16", "bf16"):
        return x.to(torch.float16 if kind == "f16" else torch.bfloat16).to(x.dtype)
    if x.shape[-1] % ACTIVATION_BLOCK:
        return x
    blocks = x.unflatten(-1, (-1, ACTIVATION_BLOCK))
    scale = (blocks.abs().amax(-1, keepdim=True) / 127).clamp(min=1e-12)
    return ((blocks / scale).round() * scale).flatten(-2)


def is_tabulated(config: Any) -> bool:
    """Return whether llama.cpp looks the model's activation up in a table."""
    activation = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", "")
    return "gelu" in str(activation)
