"""The whole model in 16 bits, in the files of transformers and in words that older programs
know.
"""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from chronicals.export import vllm
from chronicals.export.compatible import make_compatible
from chronicals.export.merge import REPORT
from chronicals.export.proof import Proof, beside_rounded, largest_error
from chronicals.export.source import Source, documents_of, logits_of
from chronicals.formats.weight_files import (
    DTYPES,
    INDEX,
    NewTensor,
    StoredTensor,
    tensors_in,
    write_tensors,
)
from chronicals.models import load_config, load_tokenizer
from chronicals.models.saved_tokenizer import save_tokenizer
from chronicals.saving import MANIFEST

KINDS = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}

BOUNDS = {"bf16": 5e-2, "fp16": 1e-2, "fp32": 1e-4}
"""Of logits beside those of the trained model, by what rounding the weights changes."""

CLIENT = "transformers"
FILES = "safetensors"

ROUNDED = "weights beside the trained ones rounded once"
"""Name of the comparison that tells whether anything was rounded on the way."""

LEFT_OUT = {MANIFEST, REPORT, INDEX, "chronicals.json"}


def write(source: Source, aside: Path, kind: str) -> None:
    """Write the folder, a tensor at a time.

    Raises:
        ValueError: a weight is too large for float16.
    """
    if kind != "fp32":
        source.check_kept(KINDS[kind])
    aside.mkdir(parents=True)
    write_files(source, aside, _in_kind(kind))
    write_beside(source, aside)
    name_dtype(aside, kind)


def _in_kind(kind: str) -> Callable[[StoredTensor], list[NewTensor]]:
    return lambda stored: [in_dtype(stored, KINDS[kind])]


def in_dtype(stored: StoredTensor, dtype: str) -> NewTensor:
    """A tensor as it is written in another dtype, by the name of safetensors; integers stay what
    they are.
    """
    kept = stored.dtype == dtype or stored.dtype not in DTYPES
    return NewTensor(
        stored.name,
        stored.dtype if kept else dtype,
        stored.shape,
        lambda: stored if kept else stored.read(),
    )


def write_files(
    source: Source, aside: Path, made: Callable[[StoredTensor], list[NewTensor]]
) -> None:
    """Write files of the same names; ``made`` gives the tensors that take the place of one."""
    by_file = defaultdict(list)
    for stored in source.tensors.values():
        by_file[stored.file].extend(made(stored))
    for file, tensors in by_file.items():
        write_tensors(aside / file.name, tensors)
    index = source.folder / INDEX
    if index.exists():
        names = {tensor.name: file.name for file, tensors in by_file.items() for tensor in tensors}
        total = sum(tensor.bytes for tensors in by_file.values() for tensor in tensors)
        described = {"metadata": {"total_size": total}, "weight_map": names}
        (aside / INDEX).write_text(json.dumps(described, indent=2))


def write_beside(source: Source, aside: Path) -> None:
    """Everything but the weights: settings, tokenizer, licence, in words that older programs
    know.
    """
    for file in sorted(source.folder.iterdir()):
        if (
            file.is_file()
            and file.suffix in (".json", ".jinja", ".txt", ".model", ".md", "")
            and file.name not in LEFT_OUT
        ):
            shutil.copyfile(file, aside / file.name)
    save_tokenizer(source.tokenizer, aside, source.config)
    make_compatible(aside, source.stops)


def name_dtype(folder: Path, kind: str, **more: Any) -> None:
    """Say in a folder's configuration which dtype its weights have, and what else is given."""
    file = folder / "config.json"
    named = str(DTYPES[KINDS[kind]]).removeprefix("torch.")
    config = json.loads(file.read_text())
    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        for name in ("dtype", "torch_dtype"):
            if name in part:
                part[name] = named
    file.write_text(json.dumps({**config, "dtype": named, **more}, indent=2))


def prove(source: Source, aside: Path, kind: str, proof: Proof) -> None:
    """Read its weights; load it by transformers, and compare."""
    prove_rounded(source, aside, _in_kind(kind), proof)
    model = prove_beside(source, aside, proof)
    source.prove_survival(model, proof)
    if kind != "fp32":
        vllm.prove(source, aside, source.trained, proof)
    error = largest_error(logits_of(model, source.documents), source.trained_logits)
    proof.bounded("logits beside the trained model's", CLIENT, error, source.at_least(BOUNDS[kind]))


def prove_rounded(
    source: Source, aside: Path, made: Callable[[StoredTensor], list[NewTensor]], proof: Proof
) -> None:
    """Compare all tensors of a folder's files with what the trained weights become, rounded once.

    Args:
        made: as ``write_files`` takes it.
    """
    found = {
        stored.name: stored
        for file in sorted(aside.glob("*.safetensors"))
        for stored in tensors_in(file)
    }
    worst: dict[str, tuple[float, float, str]] = {}
    for stored in source.trained_tensors.values():
        for new in made(stored):
            if new.name not in found or found[new.name].dtype != new.dtype:
                proof.equal("every weight is there", FILES, f"{new.name} in {new.dtype}", None)
                return
            expected = new.cast()
            read = found[new.name].content().view(expected.dtype).view(expected.shape)
            error, bound = beside_rounded(read, expected)
            worst[new.dtype] = max(worst.get(new.dtype, (-1.0, 0.0, "")), (error, bound, new.name))
    for dtype, (error, bound, name) in worst.items():
        proof.bounded(f"{ROUNDED}, {dtype}", FILES, error, bound, name)


def prove_beside(source: Source, aside: Path, proof: Proof) -> Any:
    """Compares everything but the weights; the model that was loaded."""
    ours = source.config.to_dict()
    theirs = load_config(aside).to_dict()
    unlike = {
        "dtype",
        "torch_dtype",
        "_name_or_path",
        "transformers_version",
        "quantization_config",
        *(set(theirs) - set(ours)),
    }
    settings = [
        {k: v for k, v in side.items() if k not in unlike and not isinstance(v, dict)}
        for side in (ours, theirs)
    ]
    proof.equal("settings", CLIENT, *settings)
    tokenizer = load_tokenizer(aside)
    proof.equal("chat template", CLIENT, source.tokenizer.chat_template, tokenizer.chat_template)
    proof.equal("ids of texts", CLIENT, source.documents, documents_of(tokenizer))
    model = source.load(aside)
    named = model.generation_config.eos_token_id
    proof.equal(
        "where generation ends", CLIENT, source.stops, named if isinstance(named, list) else [named]
    )
    return model
