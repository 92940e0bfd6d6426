"""An adapter as a GGUF file of its own, which llama.cpp adds to a base in GGUF when it loads that.

llama.cpp multiplies ``B A`` by alpha over the rank of each pair. rsLoRA's scale and alphas that
differ between layers are therefore written as one alpha, with the rest in B.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from chronicals.export import gguf, gguf_file, llama_cpp
from chronicals.export.merge import folder_of
from chronicals.export.part_names import language_name
from chronicals.export.proof import Proof, largest_error, relative_error
from chronicals.export.source import Source, logits_of
from chronicals.lora.loading import describe_adapter, shape_of
from chronicals.lora.peft_format import PREFIX, WEIGHTS_FILE
from chronicals.models.gguf_families import NotExpressible, family_of
from chronicals.models.gguf_reader import gguf_of
from chronicals.models.gguf_tensors import Piece

READER = "gguf"

ERROR = 1e-6
"""Of ``B A`` with its scale, relative."""

BOUND = 1e-4
TABULATED = 1e-3
"""Of llama.cpp's logits beside those of the trained model in fp32; the latter where its
activation is a table.
"""

LEAST = 1e-6
"""An adapter that changes logits by less is not there."""


def write(source: Source, target: Path) -> None:
    """Write the file.

    Raises:
        NotExpressible: the adapter does more than add ``B A`` to linear layers.
        ValueError: the model is no adapter, or the package gguf is missing.
    """
    gguf_file.require_gguf()
    from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, GGUFType, GGUFWriter, Keys

    pairs = _pairs(source)
    alpha = max(scale * len(a) for _, a, _, scale in pairs.values())
    architecture = MODEL_ARCH[family_of(source.text_config).architecture]
    writer = GGUFWriter(target, MODEL_ARCH_NAMES[architecture])
    writer.add_type(GGUFType.ADAPTER)
    writer.add_string(Keys.Adapter.TYPE, "lora")
    writer.add_float32(Keys.Adapter.LORA_ALPHA, alpha)
    for piece, a, b, scale in pairs.values():
        laid = piece.forward([b * (scale * len(a) / alpha)])
        for suffix, matrix in (("lora_a", a), ("lora_b", laid)):
            writer.add_tensor(f"{piece.name}.{suffix}", matrix.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def size(source: Source) -> int:
    return sum(a.nbytes + b.nbytes for _, a, b, _ in _pairs(source).values())


def _pairs(source: Source) -> dict[str, tuple[Piece, Tensor, Tensor, float]]:
    """By the path of a layer: its weight in GGUF, A ``[r, in]``, B ``[out, r]``, both fp32, and
    the scale of their product.
    """
    if not source.saved.adapted:
        raise ValueError(
            f"{source.saved.place}: was trained whole and has no adapter; export it whole (--to "
            "gguf-f16)"
        )
    folder = Path(source.saved.place)
    described = describe_adapter(folder)
    shape = shape_of(described, described["target_modules"])
    more = {
        "DoRA": shape.use_dora,
        "modules_to_save": shape.modules_to_save,
        "another start": shape.takes_from_weights,
    }
    if named := [name for name, there in more.items() if there]:
        raise NotExpressible(
            f"{folder}: {named[0]}: GGUF has no place for it in an adapter; export it merged "
            "(--to gguf-f16)"
        )
    planned = gguf_file.plan(source.text_config, source.language, "f32")
    pieces = {piece.sources[0]: piece for piece in planned.pieces if len(piece.sources) == 1}
    with safe_open(folder / WEIGHTS_FILE, framework="pt") as file:
        names = list(file.keys())
        ends = (".lora_A.weight", ".lora_B.weight")
        if others := [name for name in names if not name.endswith(ends)]:
            raise NotExpressible(
                f"{folder}: {others[0]} is no pair of matrices of a layer; export it merged (--to "
                "gguf-f16)"
            )
        found = {}
        for name in names:
            path = name.removeprefix(PREFIX).removesuffix(ends[0])
            if not name.endswith(ends[0]):
                continue
            piece = pieces.get(language_name(f"{path}.weight") or "")
            if piece is None:
                raise NotExpressible(
                    f"{folder}: {path} is no weight of its own in GGUF; export it merged (--to "
                    "gguf-f16)"
                )
            a, b = (file.get_tensor(f"{PREFIX}{path}{end}").float() for end in ends)
            found[path] = piece, a, b, shape.at(path).scale
    return found


def prove(source: Source, file: Path, proof: Proof) -> None:
    """Read it back; and by llama.cpp over the base in fp32, where it is there."""
    pairs = _pairs(source)
    written = gguf_file.File(file)
    alpha = written.value("adapter.lora.alpha")
    proof.equal("every pair is there", READER, 2 * len(pairs), len(written.tensors))
    errors = {}
    for path, (piece, a, b, scale) in pairs.items():
        read_a = written.read(f"{piece.name}.lora_a")
        laid = written.read(f"{piece.name}.lora_b")
        ((_, _, read_b),) = piece.backward(laid)
        errors[path] = relative_error((alpha / len(read_a)) * read_b @ read_a, scale * b @ a)
    worst = max(errors, key=lambda path: errors[path])
    proof.bounded("what is added", READER, errors[worst], ERROR, worst)
    if not llama_cpp.is_there():
        proof.not_run(
            "logits",
            "llama.cpp",
            f"{llama_cpp.PACKAGE} is not installed: pip install {llama_cpp.PACKAGE}",
        )
    elif source.saved.about.get("base"):
        proof.not_run(
            "logits", "llama.cpp", "the base was in 4 bits, which no file in GGUF holds exactly"
        )
    else:
        _prove_logits(source, file, proof)


def _prove_logits(source: Source, file: Path, proof: Proof) -> None:
    """Over the base that it was trained over, where that is a GGUF file; else over the base in
    fp32.
    """
    assert source.saved.base is not None
    trained_over = gguf_of(source.saved.base)
    with tempfile.TemporaryDirectory(dir=file.parent) as place:
        if trained_over is None:
            gguf.write(
                Source(source.saved, folder_of(source.saved.base)), Path(place) / "base.gguf", "f32"
            )
        tokens = max(map(len, source.documents)) + 1
        over = trained_over or Path(place) / "base.gguf"
        with_it, without = (llama_cpp.LlamaCpp(over, tokens, adapter=path) for path in (file, None))
        theirs, plain = (
            [torch.from_numpy(c.logits(ids)) for ids in source.documents]
            for c in (with_it, without)
        )
    model = source.trained()
    expected = logits_of(model, source.documents)
    kind = "f32" if trained_over is None else _kind(trained_over)
    with gguf.as_rounded(model, kind):
        rounded = gguf.OF_ROUNDING * largest_error(logits_of(model, source.documents), expected)
    error = gguf.prove_epsilon(source, model, theirs, largest_error(theirs, expected), proof)
    bound = source.at_least(max(_bound(source.text_config, kind), rounded))
    proof.bounded("logits beside the trained model's", "llama.cpp", error, bound)
    change = largest_error(theirs, plain)
    proof.equal("the adapter changes logits", "llama.cpp", True, change > LEAST)


def _kind(base: Path) -> str:
    """Of a file's weights, by how llama.cpp rounds what they are multiplied with."""
    written = gguf_file.File(base)
    found = {written.type_of(name) for name in written.tensors}
    exact = next((kind for kind in ("BF16", "F16") if kind in found), "F32")
    return "quantised" if found - {"F32", "F16", "BF16"} else exact.lower()


def _bound(config: Any, kind: str) -> float:
    least = BOUND if kind == "f32" else gguf.BOUNDS.get(kind, gguf.QUANTISED)
    return max(least, TABULATED) if gguf.is_tabulated(config) else least
