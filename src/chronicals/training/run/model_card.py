"""Card of a trained model: ``README.md`` beside its weights, as the hub shows it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

CARD_FILE = "README.md"
"""The file that the hub shows as a model's card."""

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
"""Fields of a recipe that a card names."""


def model_card(
    name: str,
    base: str,
    fields: Mapping[str, Any],
    facts: Mapping[str, str],
    is_adapter: bool,
) -> str:
    """Return the card of a trained model in Markdown, with the front matter that the hub reads.

    Folders of this machine are not in it.

    Args:
        name: of the run.
        base: hub name or folder of the model that was trained.
        fields: of the configuration.
        facts: what the run came to, by words.
        is_adapter: True if an adapter was trained.
    """
    is_local = Path(base).exists() or Path(base).is_absolute()
    head: dict[str, Any] = {"library_name": "peft" if is_adapter else "transformers"}
    if base and not is_local:
        head["base_model"] = base
    head["tags"] = ["chronicals", str(fields.get("objective", "fine-tuned"))]
    shown = {field: fields[field] for field in SHOWN_FIELDS if fields.get(field) is not None}
    rows = [f"| {what} | {value} |" for what, value in {**shown, **facts}.items()]
    trained = f"Trained from `{Path(base).name if is_local else base}` with chronicals."
    front = f"---\n{yaml.safe_dump(head, sort_keys=False)}---"
    table = "\n".join(["| | |", "|---|---|", *rows])
    return f"{front}\n\n# {name}\n\n{trained}\n\n{table}\n"
