"""The whole model in 16 or 32 bits, in files of transformers that older programs read, too."""

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
    FLOAT_DTYPES,
    INDEX_FILE,
    NewTensor,
    StoredTensor,
    tensors_in,
    write_tensors,
)
from chronicals.models import load_config, load_tokenizer
from chronicals.models.saved_tokenizer import save_tokenizer
from chronicals.saving import MANIFEST

FLOAT_KINDS = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}
"""Kinds of folders, and their dtype in the names of safetensors."""

WHOLE_LOGIT_BOUNDS = {"bf16": 5e-2, "fp16": 1e-2, "fp32": 1e-4}
"""Bounds on the error of logits beside the trained model's, from rounding its weights."""

TRANSFORMERS = "transformers"
SAFETENSORS = "safetensors"
"""Names of clients in proofs."""

ROUNDED = "weights beside the trained ones rounded once"
"""Name of the check that tells whether weights were rounded twice."""

OWN_FILES = {MANIFEST, REPORT, INDEX_FILE, "chronicals.json"}
"""Files of our folders that others have no use for, or that are written anew."""


def write(source: Source, aside: Path, kind: str) -> None:
    """Write the folder, one tensor at a time.

    Raises:
        ValueError: a weight is too large for float16.
    """
    if kind != "fp32":
        source.check_kept(FLOAT_KINDS[kind])
    aside.mkdir(parents=True)
    write_files(source, aside, lambda stored: [in_dtype(stored, FLOAT_KINDS[kind])])
    write_beside(source, aside)
    name_dtype(aside, kind)


def in_dtype(stored: StoredTensor, dtype: str) -> NewTensor:
    """Return a tensor to be written in another dtype (safetensors' name); integers stay integers."""
    if stored.dtype == dtype or stored.dtype not in FLOAT_DTYPES:
        return NewTensor(stored.name, stored.dtype, stored.shape, lambda: stored)
    return NewTensor(stored.name, dtype, stored.shape, stored.read)


def write_files(
    source: Source, aside: Path, made: Callable[[StoredTensor], list[NewTensor]]
) -> None:
    """Write files of the same names; ``made`` returns the tensors that replace one."""
    by_file = defaultdict(list)
    for stored in source.tensors.values():
        by_file[stored.file].extend(made(stored))
    for file, tensors in by_file.items():
        write_tensors(aside / file.name, tensors)
    index = source.folder / INDEX_FILE
    if index.exists():
        names = {tensor.name: file.name for file, tensors in by_file.items() for tensor in tensors}
        total = sum(tensor.bytes for tensors in by_file.values() for tensor in tensors)
        described = {"metadata": {"total_size": total}, "weight_map": names}
        (aside / INDEX_FILE).write_text(json.dumps(described, indent=2))


def write_beside(source: Source, aside: Path) -> None:
    """Write everything but the weights: settings, tokenizer, licence, for older programs too."""
    for file in sorted(source.folder.iterdir()):
        is_text = file.suffix in (".json", ".jinja", ".txt", ".model", ".md", "")
        if file.is_file() and is_text and file.name not in OWN_FILES:
            shutil.copyfile(file, aside / file.name)
    save_tokenizer(source.tokenizer, aside, source.config)
    make_compatible(aside, source.stops)


def name_dtype(folder: Path, kind: str, **more: Any) -> None:
    """Write the dtype of the weights, and further fields, to a folder's config.json."""
    file = folder / "config.json"
    dtype = str(FLOAT_DTYPES[FLOAT_KINDS[kind]]).removeprefix("torch.")
    config = json.loads(file.read_text())
    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        for name in ("dtype", "torch_dtype"):
            if name in part:
                part[name] = dtype
    file.write_text(json.dumps({**config, "dtype": dtype, **more}, indent=2))


def prove(source: Source, aside: Path, kind: str, proof: Proof) -> None:
    """Read the weights of the folder, load it by transformers, and compare both."""
    prove_rounded(source, aside, lambda stored: [in_dtype(stored, FLOAT_KINDS[kind])], proof)
    model = prove_beside(source, aside, proof)
    source.prove_survival(model, proof)
    if kind != "fp32":
        vllm.prove(source, aside, source.trained, proof)
    error = largest_error(logits_of(model, source.documents), source.trained_logits)
    bound = source.at_least(WHOLE_LOGIT_BOUNDS[kind])
    proof.bounded("logits beside the trained model's", TRANSFORMERS, error, bound)


def prove_rounded(
    source: Source, aside: Path, made: Callable[[StoredTensor], list[NewTensor]], proof: Proof
) -> None:
    """Compare all tensors of a folder's files with the trained weights, rounded once.

    Args:
        made: see ``write_files``.
    """
    written = {
        stored.name: stored
        for file in sorted(aside.glob("*.safetensors"))
        for stored in tensors_in(file)
    }
    worst: dict[str, tuple[float, float, str]] = {}
    for stored in source.trained_tensors.values():
        for new in made(stored):
            if new.name not in written or written[new.name].dtype != new.dtype:
                proof.equal(
                    "every weight is there", SAFETENSORS, f"{new.name} in {new.dtype}", None
                )
                return
            expected = new.cast()
            read = written[new.name].content().view(expected.dtype).view(expected.shape)
            error, bound = beside_rounded(read, expected)
            worst[new.dtype] = max(worst.get(new.dtype, (-1.0, 0.0, "")), (error, bound, new.name))
    for dtype, (error, bound, name) in worst.items():
        proof.bounded(f"{ROUNDED}, {dtype}", SAFETENSORS, error, bound, name)


def prove_beside(source: Source, aside: Path, proof: Proof) -> Any:
    """Compare everything but the weights, and return the model that transformers loads."""
    ours = source.config.to_dict()
    theirs = load_config(aside).to_dict()
    may_differ = {
        "dtype",
        "torch_dtype",
        "_name_or_path",
        "transformers_version",
        "quantization_config",
        *(set(theirs) - set(ours)),
    }
    for config in (ours, theirs):
        for name, value in list(config.items()):
            if name in may_differ or isinstance(value, dict):
                config.pop(name)
    proof.equal("settings", TRANSFORMERS, ours, theirs)
    tokenizer = load_tokenizer(aside)
    template = source.tokenizer.chat_template
    proof.equal("chat template", TRANSFORMERS, template, tokenizer.chat_template)
    proof.equal("ids of texts", TRANSFORMERS, source.documents, documents_of(tokenizer))
    model = source.load(aside)
    stops = model.generation_config.eos_token_id
    if not isinstance(stops, list):
        stops = [stops]
    proof.equal("where generation ends", TRANSFORMERS, source.stops, stops)
    return model
