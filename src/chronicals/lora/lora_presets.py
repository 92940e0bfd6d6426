"""Presets of a LoRAConfig: named choices of targets."""

from __future__ import annotations

from typing import Any

from chronicals.config.presets import ADAPTER_PRESETS
from chronicals.lora.config import LoRAConfig

LORA_PRESETS: dict[str, dict[str, Any]] = {}
"""Fields of a ``LoRAConfig`` by name of the preset, which are those of a recipe's ``lora-NAME``."""

for _name, _fields in ADAPTER_PRESETS.items():
    LORA_PRESETS[_name.removeprefix("lora-")] = {
        field.removeprefix("lora_"): value
        for field, value in _fields.items()
        if field != "use_lora"
    }


def lora_preset(name: str, **overrides: Any) -> LoRAConfig:
    """Return the configuration of the preset ``name``, with ``overrides``.

    Raises:
        ValueError: there is no such preset, or an override is not valid.
    """
    if name not in LORA_PRESETS:
        raise ValueError(
            f"lora preset {name!r}: no such preset; there are {', '.join(LORA_PRESETS)}"
        )
    fields = {**LORA_PRESETS[name], **overrides}
    if fields.get("target_parameters") and "dropout" not in fields:
        # an adapter of a parameter has no input of its own that could be dropped
        fields["dropout"] = 0.0
    return LoRAConfig(**fields)
