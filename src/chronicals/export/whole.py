"""The whole model in 16 bits, in the files of transformers and in words that older programs know."""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from pathlib import Path

from chronicals.export.compatible import make_compatible
from chronicals.export.merge import REPORT
from chronicals.export.proof import Proof, relative_error
from chronicals.export.source import Source, documents_of, logits_of
from chronicals.export.weight_files import DTYPES, INDEX, write_file
from chronicals.models import load_config, load_tokenizer
from chronicals.saving import MANIFEST

KINDS = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}

BOUNDS = {"bf16": 5e-2, "fp16": 1e-2, "fp32": 1e-4}
"""Of logits beside those of the trained model, by what rounding the weights changes."""

LEFT_OUT = {MANIFEST, REPORT, "chronicals.json"}


def write(source: Source, aside: Path, kind: str) -> None:
    """Write the folder, a tensor at a time.

    Raises:
        ValueError: a weight is too large for float16.
    """
    aside.mkdir(parents=True)
    by_file = defaultdict(list)
    for stored in source.tensors.values():
        by_file[stored.file].append(stored)
    for file, tensors in by_file.items():
        write_file(aside / file.name, tensors, lambda stored: None, {}, KINDS[kind])
    for file in sorted(source.folder.iterdir()):
        if file.is_file() and file.suffix in (".json", ".jinja", ".txt", ".model", ".md", "") and file.name not in LEFT_OUT:
            shutil.copyfile(file, aside / file.name)
    source.tokenizer.save_pretrained(aside)
    _name_dtype(aside, kind)
    make_compatible(aside, source.stops)


def _name_dtype(folder: Path, kind: str) -> None:
    file, index = folder / "config.json", folder / INDEX
    named = str(DTYPES[KINDS[kind]]).removeprefix("torch.")
    config = json.loads(file.read_text())
    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        for name in ("dtype", "torch_dtype"):
            if name in part:
                part[name] = named
    file.write_text(json.dumps({**config, "dtype": named}, indent=2))
    if index.exists():
        described = json.loads(index.read_text())
        described["metadata"] = {"total_size": sum(path.stat().st_size for path in folder.glob("*.safetensors"))}
        index.write_text(json.dumps(described, indent=2))


def prove(source: Source, aside: Path, kind: str, proof: Proof) -> None:
    """Load it by transformers, and compare."""
    client = "transformers"
    ours, theirs = source.config.to_dict(), load_config(aside).to_dict()
    unlike = {"dtype", "torch_dtype", "_name_or_path", "transformers_version", *_older(theirs, ours)}
    settings = [{k: v for k, v in side.items() if k not in unlike and not isinstance(v, dict)} for side in (ours, theirs)]
    proof.equal("settings", client, *settings)
    tokenizer = load_tokenizer(aside)
    proof.equal("chat template", client, source.tokenizer.chat_template, tokenizer.chat_template)
    proof.equal("ids of texts", client, source.documents, documents_of(tokenizer))
    model = source.load(aside)
    named = model.generation_config.eos_token_id
    proof.equal("where generation ends", client, source.stops, named if isinstance(named, list) else [named])
    source.prove_survival(model, proof)
    expected = logits_of(source.trained(), source.documents)
    found = logits_of(model, source.documents)
    error = max(relative_error(a, b) for a, b in zip(found, expected, strict=True))
    proof.bounded("logits beside the trained model's", client, error, BOUNDS[kind])


def _older(theirs: dict, ours: dict) -> set[str]:
    """Names that only the export has: older ones of what both have."""
    return set(theirs) - set(ours)
