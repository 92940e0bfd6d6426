"""PEFT's adapter types: the ones that still allow packing, and the ones a run cannot train.

If each token's output of an adapter layer depends on that token only, documents do not affect each
other and the head is unchanged. The model inside PEFT's wrapper then takes packs as before. Models
with other types are called through the wrapper, with padded rows.
"""

from __future__ import annotations

from typing import Any

BY_TOKEN = frozenset(
    {
        "LORA",
        "VERA",
        "OFT",
        "BOFT",
        "IA3",
        "LOHA",
        "LOKR",
        "HRA",
        "FOURIERFT",
        "LN_TUNING",
        "RANDLORA",
        "SHIRA",
        "ROAD",
        "MISS",
        "VBLORA",
        "TRAINABLE_TOKENS",
    }
)
"""Types whose layers compute each token's output from that token only, without a loss term."""

REFUSED = {
    "ADALORA": "adds a term to the loss and is told each step to take rank away; take LoRA, with "
    "rank_pattern for its ranks",
    "ADAMSS": "chooses what it trains by a callback each step, which is not called here; take LoRA",
    "POLY": "needs to be told the task of every row (task_ids); take LoRA",
    "SHADOW": "trains a second model beside this one, whose loss is not computed here; take LoRA",
    "XLORA": "runs the model twice to weigh its adapters; take LoRA",
}
"""Types that need more of a trainer than a step, each with the reason and the remedy."""


IN_TYPES_OF_THEIR_OWN = BY_TOKEN - {"LORA", "LN_TUNING"}
"""Types whose layers compute with fp32 parameters over a base of any dtype.

The parameters of other types have the base's dtype.
"""


def kinds(model: Any) -> list[str]:
    """Return the types of a model's PEFT adapters, with or without PEFT's wrapper."""
    found = getattr(model, "peft_config", None)
    return (
        [str(getattr(c.peft_type, "value", c.peft_type)) for c in found.values()]
        if isinstance(found, dict)
        else []
    )


def active_adapters(model: Any) -> list[str]:
    """Return the names of the active PEFT adapters in order; empty without PEFT adapters."""
    if hasattr(model, "get_base_model"):
        named = model.active_adapters
    elif getattr(model, "_hf_peft_config_loaded", False):  # by transformers' ``add_adapter``
        named = model.active_adapters()
    else:
        return []
    return [named] if isinstance(named, str) else list(named)


def unfused_kind(model: Any) -> str | None:
    """Return the first adapter type other than LoRA, or None.

    PEFT's own modules compute such adapters, so their layers are never fused.
    """
    return next((kind for kind in kinds(model) if kind != "LORA"), None)


def within_adapters(model: Any) -> Any:
    """Return the model inside PEFT's wrapper if all adapter types are in ``BY_TOKEN``.

    Activated LoRA is excluded, since its adapter depends on earlier tokens. Any other model is
    returned as it is.
    """
    if not hasattr(model, "get_base_model"):
        return model
    plain = [kind in BY_TOKEN for kind in kinds(model)]
    alone = not any(
        getattr(config, "alora_invocation_tokens", None) for config in model.peft_config.values()
    )
    return model.get_base_model() if plain and all(plain) and alone else model
