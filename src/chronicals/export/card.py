"""A model card: what the model was trained from and on, its curve, and how the artefact was
compared with it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from chronicals.export.proof import Proof
from chronicals.export.source import Source

POINTS = 8
"""Steps of the curve that are shown."""

SHOWN = (
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


def card(source: Source, name: str, kind: str, proof: Proof) -> str:
    """Markdown with the front matter that the hub reads. Paths of this machine are not in it: of
    data, only their names are.
    """
    recipe = _recipe(source)
    base = str(source.saved.base or recipe.get("model") or "")
    usual = "gguf" if kind.startswith(("gguf", "mmproj")) else "transformers"
    head: dict[str, Any] = {"library_name": {"adapter": "peft"}.get(kind, usual)}
    if base and not Path(base).exists():
        head["base_model"] = base
    if licence := source.licence:
        head["license"] = licence
    head["tags"] = [
        "chronicals",
        str(source.saved.about.get("taught", {}).get("objective", "fine-tuned")),
    ]
    parts = [f"---\n{yaml.safe_dump(head, sort_keys=False)}---", f"# {name}", f"Format: `{kind}`."]
    if base:
        parts.append(
            f"Trained from `{Path(base).name if Path(base).exists() else base}` with chronicals."
        )
    parts += [part for part in (_settings(recipe), _curve(source), _proof(proof)) if part]
    return "\n\n".join(parts) + "\n"


def _recipe(source: Source) -> dict[str, Any]:
    """What the run was asked for, where it was started from the command line."""
    run = source.run
    file = None if run is None else run / "resume.yaml"
    return yaml.safe_load(file.read_text()) or {} if file is not None and file.exists() else {}


def _settings(recipe: dict[str, Any]) -> str:
    data = recipe.get("data") or []
    named = [
        entry if isinstance(entry, str) else entry.get("path", "")
        for entry in ([data] if isinstance(data, str) else data)
    ]
    lines = (
        [
            "| data | "
            f"{', '.join(Path(path).name if Path(path).is_absolute() else path for path in named)} |"
        ]
        if named
        else []
    )
    lines += [f"| {field} | {recipe[field]} |" for field in SHOWN if recipe.get(field) is not None]
    return "\n".join(["## Training", "", "| | |", "|---|---|", *lines]) if lines else ""


def _curve(source: Source) -> str:
    run = source.run
    if run is None or not (run / "metrics.jsonl").exists():
        return ""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    held = [line for line in lines if "eval_loss" in line]
    if not steps:
        return ""
    chosen = steps[:: max(1, len(steps) // POINTS)]
    chosen += [steps[-1]] if chosen[-1] is not steps[-1] else []
    rows = [f"| {line['step']} | {line['loss']:.4f} |" for line in chosen]
    said = (
        [f"Held-out loss after step {held[-1]['step']}: {held[-1]['eval_loss']:.4f}."]
        if held
        else []
    )
    return "\n".join(
        [
            "## Loss",
            "",
            "| step | training loss |",
            "|---|---|",
            *rows,
            *(["", *said] if said else []),
        ]
    )


def _proof(proof: Proof) -> str:
    """Return a table of the comparisons; nothing where none was made."""
    if not proof.checks:
        return ""
    lines = ["## Compared with the trained model", ""]
    lines += ["| compared | client | result | measure | bound |", "|---|---|---|---|---|"]
    for check in proof.checks:
        cells = (
            check.name,
            check.client,
            _word(check.passed, check.value),
            _number(check.value),
            _number(check.bound),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _word(passed: bool | None, value: float | None) -> str:
    return {True: "equal", False: "differs", None: "not run" if value is None else "reported"}[
        passed
    ]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2e}"
