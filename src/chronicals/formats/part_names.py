"""Names of the parts of a model of images and text, the same for every version that saved it.

transformers has saved the same weights as ``language_model.model.layers``,
``model.language_model.layers``, ``model.text_model.layers`` and ``model.layers``, and towers with
or without ``vision_model`` inside. Here each part has one form of its names: the language part has
those of a text-only model, the part that reads images those of its modules.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

_LANGUAGE = re.compile(r"(?:model\.)?(?:language_model|text_model)\.(?:model\.)?(.+)")
_PLAIN_TEXT = re.compile(r"(?:model\.(?:embed_tokens|layers|norm)|lm_head)\..+")
_VISION = re.compile(
    r"(?:model\.)?((?:visual|vision_tower|vision_model|multi_modal_projector|connector)\..+)"
)


def reads_images(config: Any) -> bool:
    """Return whether a transformers configuration is of a model of images and text."""
    return (
        config.get_text_config() is not config
        and getattr(config, "vision_config", None) is not None
    )


def language_name(name: str) -> str | None:
    """Return the name that a tensor or module of the language part has in a model of text alone.

    None for those of another part.
    """
    if _PLAIN_TEXT.fullmatch(name):
        return name
    match = _LANGUAGE.fullmatch(name)
    if match is None:
        return None
    return match[1] if match[1].startswith("lm_head") else f"model.{match[1]}"


def vision_name(name: str) -> str | None:
    """Return the name below ``model`` of a tensor that reads images; None for another part's."""
    match = _VISION.fullmatch(name)
    return match[1].replace("vision_tower.vision_model.", "vision_tower.") if match else None


class StoredNames:
    """Names of the tensors in a model's files.

    Args:
        names: all of them.
    """

    def __init__(self, names: Iterable[str] = ()):
        self.names = frozenset(names)
        self._by_part = {_in_its_part(name): name for name in self.names}

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def find(self, *named: str) -> str | None:
        """Return the stored name of the first of these weights of a loaded model that is stored.

        Some files leave the first part of a name out, and those of images and text order the
        parts otherwise: names are compared as they are, then without their first part, then by
        the name in their part of the model.
        """
        for name in named:
            for form in (name, name.partition(".")[2]):
                if form in self.names:
                    return form
        for name in named:
            stored = self._by_part.get(_in_its_part(name))
            if stored is not None:
                return stored
        return None


def _in_its_part(name: str) -> str:
    return language_name(name) or vision_name(name) or name
