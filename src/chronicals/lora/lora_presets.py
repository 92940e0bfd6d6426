"""Presets of a LoRAConfig: named choices of targets."""

from __future__ import annotations

from typing import Any

from chronicals.lora.config import LoRAConfig

_ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]

LORA_PRESETS: dict[str, dict[str, Any]] = {
    "attention": {"target_modules": _ATTENTION},
    "all-linear": {"target_modules": None},
    "experts": {
        "target_modules": _ATTENTION,
        "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
    },
}
"""Fields of a ``LoRAConfig`` by name of the preset: the products of attention, every linear layer
but the head, or attention and the stacked weights of all experts of a mixture.
"""


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
