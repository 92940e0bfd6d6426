"""GGUF, for llama.cpp and what is built on it: one file, and what shows that it is the model."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from chronicals.export import gguf_file, llama_cpp
from chronicals.export.gguf_families import as_computed
from chronicals.export.gguf_tokenizer import Vocabulary, vocabulary_of
from chronicals.export.proof import Proof, cross_entropy, relative_error
from chronicals.export.source import PROBES, Source, logits_of

ERRORS = {
    "F32": 1e-6, "F16": 1e-3, "BF16": 4e-3, "Q8_0": 0.011, "Q5_1": 0.076, "Q5_0": 0.086, "Q4_1": 0.156, "Q4_0": 0.172,
}  # fmt: skip
"""Of a dequantised tensor, relative: twice that of rows of Gaussian numbers (a row of few values may be further off)."""

BOUNDS = {"f32": 1e-5, "f16": 5e-3, "bf16": 2e-2}
"""Of llama.cpp's logits beside those of torch with the very weights of the file."""

QUANTISED, TABULATED = 0.1, 5e-3
"""The same where llama.cpp quantises activations to 8 bits, and where its activation is a table (GELU)."""

READER = "gguf"


def write(source: Source, target: Path, kind: str) -> None:
    """Write the file.

    Raises:
        NotExpressible: GGUF has no form for the model or its tokenizer.
        ValueError: the package gguf is missing.
    """
    planned = gguf_file.plan(source.config, source.tensors, kind)
    gguf_file.write(target, planned, source.tensors, _vocabulary(source), kind, _about(source))


def size(source: Source, kind: str) -> int:
    """Bytes of the file's tensors."""
    return gguf_file.plan(source.config, source.tensors, kind).bytes


def _vocabulary(source: Source) -> Vocabulary:
    return vocabulary_of(source.tokenizer, source.config.vocab_size, source.stops)


def _about(source: Source) -> dict[str, str]:
    """Name and licence, as the base's card has them."""
    found = {"name": Path(source.saved.place).name if source.saved.base is None else Path(source.saved.base).name}
    card = source.folder / "README.md"
    if card.exists():
        said = re.search(r"^license:\s*(\S+)\s*$", card.read_text(), re.MULTILINE)
        found |= {"license": said[1]} if said else {}
    return found


def prove(source: Source, file: Path, kind: str, proof: Proof) -> None:
    """Read it back, by the package gguf and, where it is there, by llama.cpp."""
    planned, written = gguf_file.plan(source.config, source.tensors, kind), gguf_file.File(file)
    proof.about["types"] = _counted(written)
    _prove_tokenizer(source, written, proof)
    shapes = {name: stored.shape for name, stored in source.tensors.items()}
    found = written.model_tensors(planned.pieces, shapes)
    tied = {"lm_head.weight"} if source.config.tie_word_embeddings else set()
    proof.equal("every weight is there", READER, sorted(source.tensors.keys() - tied), sorted(found))
    proof.equal("nothing else is there", READER, sorted([*planned.types, *planned.extra]), sorted(written.tensors))
    for name, values in planned.extra.items():
        proof.equal(name, READER, values.tolist(), written.read(name).tolist())
    if source.saved.adapted:
        source.prove_merged(proof)
    for kind_of_tensor, bound in ERRORS.items():
        names = {s for p in planned.pieces if planned.types[p.name].name == kind_of_tensor for s in p.sources}
        errors = {name: relative_error(found[name], source.tensors[name].read()) for name in names}
        if errors:
            worst = max(errors, key=lambda name: errors[name])
            proof.bounded(f"weights in {kind_of_tensor}", READER, errors[worst], bound, worst)
    with tempfile.TemporaryDirectory(dir=file.parent) as place:
        model = _in_torch(source, found, Path(place), proof)
        source.prove_survival(model, proof)
        if llama_cpp.is_there():
            _prove_ids(source, file, proof)
            _prove_logits(source, file, model, kind, proof)
        else:
            reason = f"{llama_cpp.PACKAGE} is not installed: pip install {llama_cpp.PACKAGE}"
            proof.not_run("ids and logits", "llama.cpp", reason)


def _in_torch(source: Source, tensors: dict[str, torch.Tensor], folder: Path, proof: Proof) -> Any:
    """The model with the very weights of the file."""
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(whole, folder / "model.safetensors", {"format": "pt"})
    config, notes = as_computed(source.config)
    config.dtype = torch.float32
    config.save_pretrained(folder)
    for note in notes:
        proof.not_run("positions", "llama.cpp", note)
    return source.load(folder)


def _counted(written: gguf_file.File) -> dict[str, int]:
    names = [written.type_of(name) for name in written.tensors]
    return {name: names.count(name) for name in sorted(set(names))}


def _prove_tokenizer(source: Source, written: gguf_file.File, proof: Proof) -> None:
    key = "tokenizer.ggml"
    vocabulary = _vocabulary(source)
    proof.equal("tokens", READER, vocabulary.tokens, written.value(f"{key}.tokens"))
    proof.equal("types of tokens", READER, vocabulary.types, list(written.value(f"{key}.token_type")))
    proof.equal("merges", READER, vocabulary.merges, written.value(f"{key}.merges") or [])
    proof.equal("chat template", READER, vocabulary.template, written.value("tokenizer.chat_template"))
    named = {name: written.value(f"{key}.{gguf_name(name)}_token_id") for name in ("bos", "eos", "eot", "unk", "pad")}
    proof.equal("special tokens", READER, vocabulary.special, {name: n for name, n in named.items() if n is not None})
    proof.equal("begins texts with BOS", READER, vocabulary.adds_bos, bool(written.value(f"{key}.add_bos_token")))
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
    """Whether the file is right, with its own weights in torch; and what they cost beside the trained ones."""
    same_weights = logits_of(model, source.documents)
    client = llama_cpp.LlamaCpp(file, tokens=max(map(len, source.documents)) + 1)
    theirs = [torch.from_numpy(client.logits(ids)) for ids in source.documents]
    error = max(relative_error(a, b) for a, b in zip(theirs, same_weights, strict=True))
    bound = max(BOUNDS.get(kind, QUANTISED), TABULATED if _is_tabulated(source.config) else 0.0)
    proof.bounded("logits beside torch with the file's weights", "llama.cpp", error, bound)
    trained = logits_of(source.trained(), source.documents)
    losses = [
        sum(cross_entropy(logits, ids) * (len(ids) - 1) for logits, ids in zip(found, source.documents))
        / sum(len(ids) - 1 for ids in source.documents)
        for found in (trained, theirs)
    ]
    proof.reported("cross-entropy on the proof's texts, beside the trained model's", "llama.cpp", losses[1] - losses[0])
    agree = [bool(a[-1].argmax() == b[-1].argmax()) for a, b in zip(theirs, trained)]
    proof.reported("texts whose next token is the same", "llama.cpp", sum(agree) / len(agree))


def _is_tabulated(config: Any) -> bool:
    return "gelu" in str(getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", ""))
