"""Presets: named sets of fields to start from, which a recipe and single fields win over.

A preset is a set of fields with a name of its own (``PRESETS``), or a way to train and a card:
``qlora-24gb``. The size is read from the model: the settings that fit the card are taken when a run
or a plan begins (``fit``). ``auto`` is this machine's card, and the first way that fits it.
"""

from __future__ import annotations

import re
from typing import Any

from chronicals.config.errors import ConfigurationError

AUTO_PRESET = "auto"
"""Name of the preset of this machine's card, which needs the model (``planning.ways``)."""

LONG_PRESET = "long-context"
"""Name of the preset of long documents, of which a plan tells the longest (``planning.longest``)."""

CARDS = (8, 12, 16, 24, 48, 80, 141)
"""GB of the cards of presets, which are also those named where a run does not fit: from an RTX 3060
Ti to an H200."""

WAYS: dict[str, dict[str, Any]] = {
    "full": {"use_lora": False},
    "lora": {"use_lora": True},
    "qlora": {"use_lora": True, "quantization": "nf4"},
}
"""Fields of the ways to train, from the one that needs most memory to the one that needs least."""

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]

ADAPTER_PRESETS: dict[str, dict[str, Any]] = {
    "lora-attention": {"use_lora": True, "lora_target_modules": ATTENTION},
    "lora-all-linear": {"use_lora": True, "lora_target_modules": None},
    "lora-experts": {
        "use_lora": True,
        "lora_target_modules": ATTENTION,
        "lora_target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
    },
}
"""What adapters are attached to: the products of attention, every linear layer but the head, or
attention and the stacked weights of all experts of a mixture."""

PRESETS: dict[str, dict[str, Any]] = {
    "fast": {
        "batch_size": 8,
        "gradient_accumulation_steps": 2,
        "use_gradient_checkpointing": False,
    },
    "memory-lean": {
        "batch_size": 1,
        "gradient_accumulation_steps": 16,
        "use_gradient_checkpointing": True,
        "use_lora": True,
        "lora_rank": 16,
        "lora_alpha": 32,
    },
    LONG_PRESET: {
        "batch_size": 1,
        "max_seq_length": 32768,
        "gradient_accumulation_steps": 4,
        "use_gradient_checkpointing": True,
        "fit": "settings",  # layers in tiles and inputs in host memory, where the card needs them
    },
    **ADAPTER_PRESETS,
}

PRESET_WORDS = (
    f"{', '.join(PRESETS)}, {AUTO_PRESET}, or a way ({', '.join(WAYS)}) and a card of "
    f"{', '.join(map(str, CARDS))} GB, as qlora-24gb"
)
"""All presets in words, for help and errors."""


def preset_fields(name: str) -> dict[str, Any]:
    """Return the fields of a preset; of ``auto`` those that do not depend on the model.

    Raises:
        ConfigurationError: there is no such preset.
    """
    if name in PRESETS:
        return PRESETS[name]
    if name == AUTO_PRESET:
        return {"fit": "settings"}
    parts = re.fullmatch(r"([a-z]+)-(\d+)gb", name)
    if parts is None or parts[1] not in WAYS or int(parts[2]) not in CARDS:
        raise ConfigurationError(f"preset={name!r}: no such preset; there are {PRESET_WORDS}")
    return {**WAYS[parts[1]], "fit": "settings", "gpu_memory": float(parts[2])}
