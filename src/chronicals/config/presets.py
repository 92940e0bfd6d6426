"""Presets: named sets of fields to start from."""

from typing import Any

from chronicals.config.config import ChronicalsConfig, ConfigurationError

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
    "long-context": {
        "batch_size": 1,
        "max_seq_length": 32768,
        "gradient_accumulation_steps": 4,
        "use_gradient_checkpointing": True,
    },
}


def preset(name: str, **overrides: Any) -> ChronicalsConfig:
    """Return the configuration of the preset ``name``, with ``overrides``.

    Args:
        name: ``fast``, ``memory-lean`` or ``long-context``.

    Raises:
        ConfigurationError: there is no such preset, or a field is wrong.
    """
    return ChronicalsConfig(**{**preset_fields(name), **overrides})


def preset_fields(name: str) -> dict[str, Any]:
    """Return the fields of a preset.

    Raises:
        ConfigurationError: there is no such preset.
    """
    if name not in PRESETS:
        raise ConfigurationError(f"preset={name!r}: no such preset; there are {', '.join(PRESETS)}")
    return PRESETS[name]
