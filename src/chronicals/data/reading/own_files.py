"""Files of runs, models and token stores, which may lie beside rows and hold none."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from pathlib import Path

DATA_REPORTS = ("train_dataset.json", "eval_dataset.json")
"""The gate's reports in the folder of a run."""

RUN_FILES = {
    *DATA_REPORTS,
    "checkpoints",
    "log.txt",
    "metrics.jsonl",
    "model",
    "report.html",
    "resume.yaml",
    "samples.json",
    "samples.jsonl",
    "tensorboard",
    "trackers.json",
    "wandb",
}
"""Files and folders that a run writes into its folder."""

_MODEL_FILES = {
    "adapter_config.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "chronicals.json",
    "config.json",
    "generation_config.json",
    "manifest.json",
    "merges.txt",
    "model.safetensors.index.json",
    "preprocessor_config.json",
    "processor_config.json",
    "pytorch_model.bin.index.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
}
"""Files in the folder of a model beside its weights."""

STORE_FILE = re.compile(r"[0-9a-f]{32}\.(arrow|json)|file-digests\.json")
"""Names of token stores and of the digests of files beside them."""


def own_files(folder: Path, names: Collection[str]) -> set[str]:
    """Return the files and folders that belong to a run, a model or a token store.

    Args:
        folder: holds all of them.
        names: of the files and folders in it.
    """
    own = set[str]()
    is_run = (
        "resume.yaml" in names
        or ("model" in names and (folder / "model" / "chronicals.json").is_file())
        or ("checkpoints" in names and any((folder / "checkpoints").glob("step-*/manifest.json")))
    )
    for name in DATA_REPORTS:
        file = folder / name
        if is_run or name not in names or not file.is_file() or file.stat().st_size > 1 << 20:
            continue
        try:
            report = json.loads(file.read_text())
        except ValueError:
            continue
        # A user's file may have the name of the gate's report.
        fields = {"data", "rows", "targets", "kinds", "findings"}
        is_run = isinstance(report, dict) and fields <= report.keys()
    if is_run:
        own |= RUN_FILES.intersection(names)
    weights = any(name.endswith((".safetensors", ".bin")) for name in names)
    if (
        "adapter_config.json" in names
        or {"config.json", "tokenizer_config.json"} <= set(names)
        or ("config.json" in names and weights)
    ):
        own |= _MODEL_FILES.intersection(names)
    if any(name.endswith(".arrow") or name == "file-digests.json" for name in names):
        own |= {name for name in names if STORE_FILE.fullmatch(name)}
    return own
