"""A model card: base, data and settings of the training, its losses, and the artefact's proof."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from chronicals.export.proof import Proof
from chronicals.export.source import SourceModel

CURVE_POINTS = 8
"""Steps of the curve of losses that are shown."""

SHOWN_FIELDS = (
    "objective",
    "learning_rate",
    "num_epochs",
    "max_steps",
    "batch_size",
    "gradient_accumulation_steps",
    "max_seq_length",
    "use_lora",
    "lora_rank",
    "quantization",
    "mixed_precision",
    "seed",
)
"""Fields of a recipe that the card names."""


def card(source: SourceModel, name: str, kind: str, proof: Proof) -> str:
    """Return a card in Markdown, with the front matter that the hub reads.

    Paths of this machine are not in it; data in files have only their names.
    """
    recipe: dict[str, Any] = {}  # of a run that was started from the command line
    if source.run is not None and (source.run / "resume.yaml").exists():
        recipe = yaml.safe_load((source.run / "resume.yaml").read_text()) or {}
    base = str(source.saved.base or recipe.get("model") or "")
    is_local = Path(base).exists()
    library = "gguf" if kind.startswith(("gguf", "mmproj")) else "transformers"
    head: dict[str, Any] = {"library_name": "peft" if kind == "adapter" else library}
    if base and not is_local:
        head["base_model"] = base
    if source.licence:
        head["license"] = source.licence
    objective = source.saved.about.get("taught", {}).get("objective", "fine-tuned")
    head["tags"] = ["chronicals", str(objective)]
    parts = [f"---\n{yaml.safe_dump(head, sort_keys=False)}---", f"# {name}", f"Format: `{kind}`."]
    if base:
        parts.append(f"Trained from `{Path(base).name if is_local else base}` with chronicals.")
    # The recipe's data, without folders of this machine, and its main settings.
    data = recipe.get("data") or []
    names = []
    for entry in [data] if isinstance(data, str) else data:
        path = entry if isinstance(entry, str) else entry.get("path", "")
        names.append(Path(path).name if Path(path).is_absolute() else path)
    lines = [f"| data | {', '.join(names)} |"] if names else []
    for field in SHOWN_FIELDS:
        if recipe.get(field) is not None:
            lines.append(f"| {field} | {recipe[field]} |")
    if lines:
        parts.append("\n".join(["## Training", "", "| | |", "|---|---|", *lines]))
    curve = _curve(source)
    if curve:
        parts.append(curve)
    if proof.checks:
        lines = ["## Compared with the trained model", ""]
        lines += ["| compared | client | result | measure | bound |", "|---|---|---|---|---|"]
        for check in proof.checks:
            if check.passed is None:
                result = "not run" if check.value is None else "reported"
            else:
                result = "equal" if check.passed else "differs"
            numbers = ["" if x is None else f"{x:.2e}" for x in (check.value, check.bound)]
            lines.append(f"| {' | '.join([check.name, check.client, result, *numbers])} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def _curve(source: SourceModel) -> str:
    """Return a table of training losses, and the last held-out loss; empty without a run."""
    run = source.run
    if run is None or not (run / "metrics.jsonl").exists():
        return ""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    evaluations = [line for line in lines if "eval_loss" in line]
    if not steps:
        return ""
    chosen = steps[:: max(1, len(steps) // CURVE_POINTS)]
    if chosen[-1] is not steps[-1]:
        chosen.append(steps[-1])
    rows = ["## Loss", "", "| step | training loss |", "|---|---|"]
    rows += [f"| {line['step']} | {line['loss']:.4f} |" for line in chosen]
    if evaluations:
        last = evaluations[-1]
        rows += ["", f"Held-out loss after step {last['step']}: {last['eval_loss']:.4f}."]
    return "\n".join(rows)
