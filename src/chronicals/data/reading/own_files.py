"""Files that chronicals or transformers write beside rows: those of runs, models and token
stores, which are no rows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from pathlib import Path

REPORTS = ("train_dataset.json", "eval_dataset.json")
"""The gate's reports in the folder of a run."""

RUN = {
    *REPORTS,
    "checkpoints",
    "log.txt",
    "metrics.jsonl",
    "model",
    "report.html",
    "resume.yaml",
    "samples.json",
    "tensorboard",
    "trackers.json",
    "wandb",
}
"""What a run writes into its folder."""

MODEL = {
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
"""What is in the folder of a model beside its weights."""

STORE = re.compile(r"[0-9a-f]{32}\.(arrow|json)|file-digests\.json")
"""Token stores and the digests of files beside them."""


def own_files(folder: Path, names: Collection[str]) -> set[str]:
    """Those of ``names``, files and folders in ``folder``, that hold no rows of anybody's."""
    found = set[str]()
    if _is_run(folder, names):
        found |= RUN.intersection(names)
    if (
        "adapter_config.json" in names
        or {"config.json", "tokenizer_config.json"} <= set(names)
        or _holds_weights(names)
    ):
        found |= MODEL.intersection(names)
    if any(name.endswith(".arrow") or name == "file-digests.json" for name in names):
        found |= {name for name in names if STORE.fullmatch(name)}
    return found


def _is_run(folder: Path, names: Collection[str]) -> bool:
    if "resume.yaml" in names or (
        "model" in names and (folder / "model" / "chronicals.json").is_file()
    ):
        return True
    kept = "checkpoints" in names and any((folder / "checkpoints").glob("step-*/manifest.json"))
    return kept or any(name in names and _is_report(folder / name) for name in REPORTS)


def _is_report(file: Path) -> bool:
    if not file.is_file() or file.stat().st_size > 1 << 20:
        return False
    try:
        report = json.loads(file.read_text())
    except ValueError:
        return False
    return (
        isinstance(report, dict)
        and {"data", "rows", "targets", "kinds", "findings"} <= report.keys()
    )


def _holds_weights(names: Collection[str]) -> bool:
    return "config.json" in names and any(name.endswith((".safetensors", ".bin")) for name in names)
