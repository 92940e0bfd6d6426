"""PEFT's kinds of adapters: which a model is looked through for, and which a run cannot train.

An adapter whose layers take every token by itself leaves documents apart and the head where it is:
the model beneath PEFT's wrapping takes packs as it did. Other kinds go through the wrapping, in
padded rows.
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
"""Kinds whose layers compute each token's output of that token's input alone, and whose model
adds nothing to its loss.
"""

REFUSED = {
    "ADALORA": "adds a term to the loss and is told each step to take rank away; take LoRA, with "
    "rank_pattern for its ranks",
    "ADAMSS": "chooses what it trains by a callback each step, which is not called here; take LoRA",
    "POLY": "needs to be told the task of every row (task_ids); take LoRA",
    "SHADOW": "trains a second model beside this one, whose loss is not computed here; take LoRA",
    "XLORA": "runs the model twice to weigh its adapters; take LoRA",
}
"""Kinds that need more of a trainer than a step, and what to do instead."""


IN_TYPES_OF_THEIR_OWN = BY_TOKEN - {"LORA", "LN_TUNING"}
"""Kinds whose layers compute with fp32 parameters over a base of any type; of others parameters
are of the base's type.
"""


def kinds(model: Any) -> list[str]:
    """Of the adapters of PEFT that a model has, wrapped or beneath the wrapping."""
    found = getattr(model, "peft_config", None)
    return (
        [str(getattr(c.peft_type, "value", c.peft_type)) for c in found.values()]
        if isinstance(found, dict)
        else []
    )


def active_adapters(model: Any) -> list[str]:
    """Names of the adapters of PEFT that a model computes with, in their order; none where it
    has only ours, or none.
    """
    if hasattr(model, "get_base_model"):
        named = model.active_adapters
    elif attached_by_transformers(model):
        named = model.active_adapters()
    else:
        return []
    return [named] if isinstance(named, str) else list(named)


def attached_by_transformers(model: Any) -> bool:
    """Whether a model has adapters of PEFT by transformers' ``add_adapter``, without a wrapping."""
    return bool(getattr(model, "_hf_peft_config_loaded", False))


def unfused_kind(model: Any) -> str | None:
    """The first of these that PEFT's own modules compute, in layers that are never fused: any
    but LoRA.
    """
    return next((kind for kind in kinds(model) if kind != "LORA"), None)


def stays_in_fp32(model: Any) -> bool:
    """Whether adapters of PEFT are trained in fp32 over any base."""
    found = kinds(model)
    return bool(found) and all(kind in IN_TYPES_OF_THEIR_OWN for kind in found)


def within_adapters(model: Any) -> Any:
    """The model in PEFT's wrapping by adapters whose layers take every token by itself; any
    other model as it is.
    """
    if not hasattr(model, "get_base_model"):
        return model
    plain = [kind in BY_TOKEN for kind in kinds(model)]
    alone = not any(
        getattr(config, "alora_invocation_tokens", None) for config in model.peft_config.values()
    )
    return model.get_base_model() if plain and all(plain) and alone else model
