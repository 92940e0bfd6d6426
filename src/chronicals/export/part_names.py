"""Names of a model of images and text: which part of it a tensor belongs to, whatever the version that saved it.

transformers has saved the same weights as ``language_model.model.layers``, ``model.language_model.layers``,
``model.text_model.layers`` and ``model.layers``, and towers with ``vision_model`` inside or without it. Here each part has one
form of its names: the language part's are those of a model of text alone, what reads images has those of its modules.
"""

from __future__ import annotations

import re
from typing import Any

LANGUAGE = re.compile(r"(?:model\.)?(?:language_model|text_model)\.(?:model\.)?(.+)")
PLAIN = re.compile(r"(?:model\.(?:embed_tokens|layers|norm)|lm_head)\..+")
VISION = re.compile(r"(?:model\.)?((?:visual|vision_tower|vision_model|multi_modal_projector|connector)\..+)")


def reads_images(config: Any) -> bool:
    """Whether a transformers configuration is of a model of images and text."""
    return config.get_text_config() is not config and getattr(config, "vision_config", None) is not None


def language_name(name: str) -> str | None:
    """What a tensor or module of the language part is called in a model of text alone; None for those of another part."""
    if PLAIN.fullmatch(name):
        return name
    found = LANGUAGE.fullmatch(name)
    if found is None:
        return None
    return found[1] if found[1].startswith("lm_head") else f"model.{found[1]}"


def vision_name(name: str) -> str | None:
    """What a tensor that reads images is called below ``model``; None for those of another part."""
    found = VISION.fullmatch(name)
    return found[1].replace("vision_tower.vision_model.", "vision_tower.") if found else None
