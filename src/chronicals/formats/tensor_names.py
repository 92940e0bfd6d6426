"""Names of weights in a model's files, and their places in the model that is loaded.

Parts of a model of images and text: transformers has saved the same weights as ``language_model.model.layers``,
``model.language_model.layers``, ``model.text_model.layers`` and ``model.layers``, and towers with
or without ``vision_model`` inside. Here each part has one form of its names: the language part has
those of a text-only model, the part that reads images those of its modules.

Experts: files hold one matrix an expert, ``layers.3.mlp.experts.7.up_proj.weight`` (Mixtral's
``block_sparse_moe.experts.7.w3``). A loaded model has two parameters a layer,
``experts.gate_up_proj`` ``[E, 2 I, D]``, whose upper half is the gate, and ``experts.down_proj``
``[E, D, I]``. Some families are stored stacked as well, some of those with transposed matrices.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

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
        self._by_part = {
            language_name(name) or vision_name(name) or name: name for name in self.names
        }

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
            stored = self._by_part.get(language_name(name) or vision_name(name) or name)
            if stored is not None:
                return stored
        return None


EXPERT_NAME = re.compile(r"(?:model\.)?layers\.(\d+)\.\w+\.experts\.(\d+)\.(\w+)\.weight")
"""Name of one expert's matrix in a file: layer, expert, and the matrix's own name."""

STACK_NAME = re.compile(
    r"(?:model\.)?layers\.(\d+)\.\w+\.experts\.(gate_up_proj|down_proj)(_bias)?"
)
"""Name of a parameter of stacked experts: layer, name, and the end of a bias's name."""

GATE = "gate_proj"
UP = "up_proj"
DOWN = "down_proj"
EXPERT_ROLES = {GATE: GATE, "w1": GATE, UP: UP, "w3": UP, DOWN: DOWN, "w2": DOWN}
"""Roles of an expert's matrices by their names in files."""


@dataclass(frozen=True)
class Expert:
    """A matrix of an expert.

    Attributes:
        layer, number: of the decoder layer, and of the expert in it.
        role: ``GATE``, ``UP`` or ``DOWN``.
    """

    layer: int
    number: int
    role: str

    @classmethod
    def named(cls, name: str) -> Expert | None:
        """Return the matrix that a tensor of a file is; None if it is no expert's matrix."""
        match = EXPERT_NAME.fullmatch(name)
        if match is None or match[3] not in EXPERT_ROLES:
            return None
        return cls(int(match[1]), int(match[2]), EXPERT_ROLES[match[3]])

    @property
    def stack(self) -> tuple[int, str]:
        """Layer and name of the stacked parameter that holds the matrix."""
        return self.layer, "down_proj" if self.role == DOWN else "gate_up_proj"

    def within(self, stack: Tensor) -> Tensor:
        """Return the part of that parameter, not transposed, that is the matrix."""
        matrices = stack[self.number]
        return matrices if self.role == DOWN else matrices.chunk(2)[self.role == UP]


def stack_named(name: str) -> tuple[int, str] | None:
    """Return layer and name of a parameter of stacked experts; None for any other tensor."""
    match = STACK_NAME.fullmatch(name)
    return (int(match[1]), match[2]) if match and not match[3] else None
