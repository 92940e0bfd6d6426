"""Names of experts' weights in a model's files, and their places in transformers 5.

Files hold one matrix an expert, ``layers.3.mlp.experts.7.up_proj.weight`` (Mixtral's
``block_sparse_moe.experts.7.w3``). A loaded model has two parameters a layer,
``experts.gate_up_proj`` ``[E, 2 I, D]``, whose upper half is the gate, and ``experts.down_proj``
``[E, D, I]``. Some families are stored stacked as well, some of those with transposed matrices.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from torch import Tensor

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
