"""Names of a model of images and text: which part of it a tensor belongs to, whatever the version
that saved it.

transformers has saved the same weights as ``language_model.model.layers``,
``model.language_model.layers``, ``model.text_model.layers`` and ``model.layers``, and towers with
``vision_model`` inside or without it. Here each part has one form of its names: the language part's
are those of a model of text alone, what reads images has those of its modules.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

LANGUAGE = re.compile(r"(?:model\.)?(?:language_model|text_model)\.(?:model\.)?(.+)")
PLAIN = re.compile(r"(?:model\.(?:embed_tokens|layers|norm)|lm_head)\..+")
VISION = re.compile(
    r"(?:model\.)?((?:visual|vision_tower|vision_model|multi_modal_projector|connector)\..+)"
)


def reads_images(config: Any) -> bool:
    """Whether a transformers configuration is of a model of images and text."""
    return (
        config.get_text_config() is not config
        and getattr(config, "vision_config", None) is not None
    )


def language_name(name: str) -> str | None:
    """What a tensor or module of the language part is called in a model of text alone; None for
    those of another part.
    """
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
        """The first of these names of a loaded model's weights that a file has, by that name or
        by another of the same part: some files leave the first part of a name out, and those of
        images and text order the parts otherwise."""
        forms = [form for name in named for form in (name, name.partition(".")[2])]
        found = next((form for form in forms if form in self.names), None)
        return found or next(
            (
                self._by_part[form]
                for name in named
                if (form := _in_its_part(name)) in self._by_part
            ),
            None,
        )


def _in_its_part(name: str) -> str:
    return language_name(name) or vision_name(name) or name
