"""GGUF, for llama.cpp and the programs that use it: the file of a model or of its language part.

A file is proved by the package gguf, and by llama.cpp if it is installed. Errors are relative, of
Frobenius norms. llama.cpp's logits are compared with those of torch with the weights of the file,
so that a bound tells a wrong file from a coarse one.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PretrainedConfig

from chronicals.export import llama_cpp
from chronicals.export.artefact import ArtefactFormat
from chronicals.export.importance import importance_of
from chronicals.export.proof import (
    ROUNDED_ONCE,
    SUMMED,
    Proof,
    cross_entropy,
    largest_error,
    relative_error,
)
from chronicals.export.source import PROBES, SourceModel, logits_of
from chronicals.export.whole import ROUNDED, in_dtype
from chronicals.formats.gguf.families import family_of
from chronicals.formats.gguf.reader import GGUFFile
from chronicals.formats.gguf.rotation import as_computed
from chronicals.formats.gguf.tensors import RestoredTensors
from chronicals.formats.gguf.tokenizer import vocabulary_of
from chronicals.formats.gguf.vocabulary import read_vocabulary
from chronicals.formats.gguf.writer import (
    IMPORTANCE_KINDS,
    WEIGHT_TYPES,
    GGUFPlan,
    plan_gguf,
    write_gguf,
)
from chronicals.formats.weight_files import NewTensor, StoredTensor, write_tensors
from chronicals.quantization import is_linear

TYPE_ERRORS = {
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
"""The bound is at least this multiple of the change by rounding activations alike in torch."""

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


class GGUFModel(ArtefactFormat):
    """A file in GGUF, its ``kind`` one of ``WEIGHT_TYPES`` or of ``LLAMA_CPP_KINDS``."""

    extension = ".gguf"
    takes_projector = True
    served_by = "llama-server -m {artefact}"

    def size(self, source: SourceModel) -> int:
        """Return the bytes of the file's tensors, with those of the file that it is made of."""
        own_bytes = self.plan(source).bytes
        return own_bytes if self.kind in WEIGHT_TYPES else 2 * own_bytes

    def write(self, source: SourceModel, aside: Path) -> None:
        """Write the file.

        Raises:
            NotExpressible: GGUF has no form for the model or its tokenizer.
            ValueError: the package gguf is missing, or llama.cpp where it quantises.
        """
        planned = self.plan(source)
        if self.kind != "f32":
            source.check_kept("F16" if self.kind == "f16" else "BF16")
        if self.kind in WEIGHT_TYPES:
            _write_ours(source, aside, planned, self.kind)
            return
        if self.kind in IMPORTANCE_KINDS and source.importance is None:
            raise ValueError(
                f"gguf-{self.kind}: so few bits need to know which columns of a weight matter; "
                "give rows to measure it over (--importance your.jsonl)"
            )
        if not llama_cpp.is_there():
            raise ValueError(
                f"gguf-{self.kind}: weights are quantised by llama.cpp itself, through "
                f"{llama_cpp.PACKAGE}, which is not installed: pip install {llama_cpp.PACKAGE}"
            )
        import gguf

        unquantised = aside.with_name(f"{aside.name}.whole")
        _write_ours(source, unquantised, planned, self.own_kind(source))
        importance = None
        if source.importance is not None:
            rows = source.rows_of(source.importance)
            # Modules of this model have the names of the files; with adapters they have others.
            importance = importance_of(source.load(source.folder), planned.pieces, rows)
        file_type = int(gguf.LlamaFileType[f"MOSTLY_{self.kind.upper()}"])
        llama_cpp.quantise(unquantised, aside, file_type, importance)
        unquantised.unlink()

    def own_kind(self, source: SourceModel) -> str:
        """Return the kind of the file that is written here.

        A file that llama.cpp quantises is made of one with the weights as they are stored.
        """
        if self.kind in WEIGHT_TYPES:
            return self.kind
        dtypes = {tensor.dtype for tensor in source.language.values()}
        if len(dtypes) > 1:
            return "f32"
        return {"BF16": "bf16", "F16": "f16"}.get(dtypes.pop(), "f32")

    def plan(self, source: SourceModel) -> GGUFPlan:
        """Plan the file that is written here: of the kind itself, or what llama.cpp quantises."""
        return plan_gguf(source.text_config, source.language, self.own_kind(source))

    def prove(self, source: SourceModel, aside: Path, proof: Proof) -> None:
        """Read the file back, by the package gguf and, if it is installed, by llama.cpp."""
        planned = self.plan(source)
        written = GGUFFile(aside)
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
        trained = source.language_part(source.trained_tensors)
        prove_weights(trained, restored, written, proof)
        if self.kind in WEIGHT_TYPES:
            _prove_rounded(trained, written, planned, proof)
        with tempfile.TemporaryDirectory(dir=aside.parent) as place:
            # The model with the weights of the file; the part that reads images is unchanged.
            to_load = []
            for name in restored:
                stored_name = source.language[name].name
                read = partial(restored.__getitem__, name)
                to_load.append(NewTensor(stored_name, "F32", tuple(restored.shapes[name]), read))
            for stored in source.beside_language:
                to_load.append(in_dtype(stored, stored.dtype))
            write_tensors(Path(place) / "model.safetensors", to_load)
            model = _loaded(source, Path(place), source.config)
            source.prove_survival(model, proof)
            beside_trained = "logits beside the trained model's"
            error = largest_error(logits_of(model, source.documents), source.trained_logits)
            if self.kind in TRAINED_LOGIT_BOUNDS:
                bound = source.at_least(TRAINED_LOGIT_BOUNDS[self.kind])
                proof.bounded(beside_trained, "torch", error, bound)
            else:  # quantised weights have no bound
                proof.reported(beside_trained, "torch", error)
            config, notes = as_computed(source.config)
            if notes:  # llama.cpp rotates otherwise than the model was trained
                model = _loaded(source, Path(place), config)
                error = largest_error(logits_of(model, source.documents), source.trained_logits)
                for note in notes:
                    proof.reported("positions", "llama.cpp", error, note)
            if llama_cpp.is_there():
                _prove_by_llama_cpp(source, aside, model, self.kind, proof)
            else:
                proof.not_run("ids and logits", "llama.cpp", llama_cpp.NOT_INSTALLED)


def _write_ours(source: SourceModel, target: Path, planned: GGUFPlan, kind: str) -> None:
    """Write a file of a kind of ``WEIGHT_TYPES``, with the model's name and licence."""
    saved = source.saved
    about = {"name": Path(saved.place if saved.base is None else saved.base).name}
    if source.licence:
        about["license"] = source.licence
    vocabulary = vocabulary_of(source.tokenizer, source.text_config.vocab_size, source.stops)
    write_gguf(target, planned, source.language, vocabulary, kind, about)


def _loaded(source: SourceModel, folder: Path, config: PretrainedConfig) -> Any:
    """Return the model of a folder with weights, in fp32, with another configuration."""
    config = copy.deepcopy(config)
    config.dtype = torch.float32
    config.save_pretrained(folder)
    return source.load(folder)


def _prove_tokenizer(source: SourceModel, written: GGUFFile, proof: Proof) -> None:
    """Compare the file's settings of the tokenizer with those that the tokenizer gives."""
    expected = vocabulary_of(source.tokenizer, source.text_config.vocab_size, source.stops)
    read = read_vocabulary(written)
    scores = np.array(expected.scores, np.float32).tolist()
    charsmaps = [None if x.charsmap is None else list(x.charsmap) for x in (expected, read)]
    blanks = [[x.space_prefix, x.merges_blanks] for x in (expected, read)]
    comparisons: list[tuple[str, Any, Any]] = [
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
    for name, ours, theirs in comparisons:
        proof.equal(name, GGUF_READER, ours, theirs)
    for note in expected.notes:
        proof.not_run("normalisation", "llama.cpp", note)


def prove_weights(
    expected: dict[str, StoredTensor],
    restored: RestoredTensors,
    written: GGUFFile,
    proof: Proof,
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


def _prove_rounded(
    trained: dict[str, StoredTensor], written: GGUFFile, planned: GGUFPlan, proof: Proof
) -> None:
    """Compare every tensor with the trained weights, summed anew and rounded once to its type."""
    import gguf as package

    worst: dict[str, tuple[float, float, str]] = {}
    for piece in planned.pieces:
        sources = [trained[name].read().float() for name in piece.sources]
        values = piece.forward(sources).contiguous()
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


def _prove_by_llama_cpp(
    source: SourceModel, file: Path, model: Any, kind: str, proof: Proof
) -> None:
    """Compare llama.cpp's token ids with the tokenizer's, and its logits with torch's.

    The cost of the file beside the trained model is reported.

    Args:
        source: the exported model.
        file: in GGUF.
        model: with the weights of the file.
        kind: of the file.
        proof: gets the checks.
    """
    vocabulary = llama_cpp.LlamaCpp(file, vocabulary_only=True)
    for text in PROBES:
        ids = source.tokenizer(text)["input_ids"]
        proof.equal(f"ids of {text[:20]!r}…", "llama.cpp", ids, vocabulary.ids(text, special=False))
    if source.conversation is not None:
        ids = source.documents[-1]
        proof.equal("ids of a conversation", "llama.cpp", ids, vocabulary.ids(source.conversation))
    not_ends = [stop for stop in source.stops if not vocabulary.ends(stop)]
    proof.equal("generation ends at", "llama.cpp", [], not_ends)
    same_weights = logits_of(model, source.documents)
    client = llama_cpp.LlamaCpp(file, tokens=max(map(len, source.documents)) + 1)
    theirs = [torch.from_numpy(client.logits(ids)) for ids in source.documents]
    error = prove_epsilon(source, model, theirs, largest_error(theirs, same_weights), proof)
    bound = llama_cpp_bound(source, model, kind, same_weights, LOGIT_BOUNDS)
    proof.bounded(FILE_LOGITS_CHECK, "llama.cpp", error, bound)
    trained = source.trained_logits
    cost = cross_entropy(theirs, source.documents) - cross_entropy(trained, source.documents)
    proof.reported(
        "cross-entropy on the proof's texts, beside the trained model's", "llama.cpp", cost
    )
    agree = [bool(a[-1].argmax() == b[-1].argmax()) for a, b in zip(theirs, trained)]
    proof.reported("texts whose next token is the same", "llama.cpp", sum(agree) / len(agree))


def llama_cpp_bound(
    source: SourceModel,
    model: Any,
    kind: str,
    expected: list[torch.Tensor],
    bounds: Mapping[str, float],
) -> float:
    """Return the bound on the error of llama.cpp's logits beside those of a model in torch.

    It is at least a multiple of the change that rounding activations as llama.cpp does makes in
    torch.

    Args:
        source: the exported model.
        model: in torch.
        kind: of the file's weights, by which llama.cpp rounds activations.
        expected: the model's logits of the documents.
        bounds: of kinds that are not quantised.
    """
    with as_rounded(model, kind):
        rounded = largest_error(logits_of(model, source.documents), expected)
    bound = max(bounds.get(kind, QUANTISED_LOGIT_BOUND), ROUNDING_FACTOR * rounded)
    config = source.text_config
    activation = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", "")
    if "gelu" in str(activation):  # which llama.cpp looks up in a table
        bound = max(bound, TABLE_LOGIT_BOUND)
    return source.at_least(bound)


def prove_epsilon(
    source: SourceModel, model: Any, theirs: list[torch.Tensor], error: float, proof: Proof
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

    def round_input(kind: str, _: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (_rounded(inputs[0], kind), *inputs[1:])

    hooks = []
    for module in model.modules():
        if is_linear(module) and kind != "f32":
            hooks.append(module.register_forward_pre_hook(partial(round_input, kind)))
        elif "GELU" in type(module).__name__:
            hooks.append(module.register_forward_pre_hook(partial(round_input, "f16")))
            hooks.append(module.register_forward_hook(lambda _, inputs, out: _rounded(out, "f16")))
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
