"""How much each column of a weight matters: the mean square of what it is multiplied with, over a
user's own rows.

llama.cpp weighs the error of quantising by it (an importance matrix). Experts are measured each by
itself, over the tokens that the router gave it.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from chronicals.export.part_names import language_name
from chronicals.models.experts import Expert, stack_named, watch_experts
from chronicals.models.gguf_tensors import Piece

logger = logging.getLogger(__name__)

TOKENS = 1 << 16
"""Enough to be measured over."""


class Squares:
    """Sums of squares by column, of each matrix of some stacks of them; a linear layer has a
    stack of one.
    """

    def __init__(self) -> None:
        self._sums: dict[Hashable, Tensor] = {}
        self._rows: dict[Hashable, Tensor] = {}

    def add(self, stack: Hashable, matrices: int, number: int, x: Tensor) -> None:
        """Inputs ``[..., in]`` of a matrix of a stack of so many."""
        flat = x.reshape(-1, x.shape[-1]).float()
        if stack not in self._sums:
            self._sums[stack] = torch.zeros(matrices, flat.shape[1], dtype=torch.float64)
            self._rows[stack] = torch.zeros(matrices, 1, dtype=torch.float64)
        self._sums[stack][number] += flat.square().sum(0).double().cpu()
        self._rows[stack][number] += len(flat)

    def mean(self, stack: Hashable) -> np.ndarray | None:
        """fp32 ``[matrices, in]``; ones for a matrix that saw nothing, whose columns so matter
        alike; None where none did.
        """
        if stack not in self._sums:
            return None
        sums = self._sums[stack]
        rows = self._rows[stack]
        return torch.where(rows > 0, sums / rows.clamp(min=1), 1.0).float().numpy()

    def unseen(self) -> int:
        """Matrices that saw nothing, of stacks of which others did."""
        return sum(int((rows == 0).sum()) for rows in self._rows.values())


@torch.no_grad()
def importance_of(
    model: Any, pieces: list[Piece], documents: list[list[int]]
) -> dict[str, np.ndarray]:
    """fp32 by the name of a tensor in the file: ``[in]`` of one that is a linear layer's weight,
    ``[E, in]`` of experts.

    Args:
        model: in the names of whose modules the pieces' sources are, but for a language part's.
        documents: token ids, of which the first ``TOKENS`` are taken.
    """
    squares = Squares()
    layers = {
        language_name(name) or name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    }
    named: dict[str, Hashable] = {}
    for piece in pieces:
        of_a_layer = piece.sources[0].removesuffix(".weight")
        if (stack := _stack_of(piece.sources[0])) is not None and not piece.name.endswith(".bias"):
            named[piece.name] = stack
        elif of_a_layer in layers and len(piece.sources) == 1:
            named[piece.name] = of_a_layer
    hooks = [
        layers[path].register_forward_pre_hook(partial(_add_inputs, squares, path))
        for path in dict.fromkeys(path for path in named.values() if isinstance(path, str))
    ]
    undo = watch_experts(model, partial(_add_experts, squares, model))
    try:
        _run(model, documents)
    finally:
        undo()
        for hook in hooks:
            hook.remove()
    if unseen := squares.unseen():
        logger.info(
            "importance: %d matrices of experts saw none of the rows; their columns count alike",
            unseen,
        )
    found = {name: (stack, squares.mean(stack)) for name, stack in named.items()}
    return {
        name: mean[0] if isinstance(stack, str) else mean
        for name, (stack, mean) in found.items()
        if mean is not None
    }


def _stack_of(name: str) -> tuple[int, str] | None:
    """The stack of experts that a tensor of the model's files is of."""
    expert = Expert.named(name)
    return stack_named(name) if expert is None else expert.stack


def _add_inputs(squares: Squares, path: str, layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    squares.add(path, 1, 0, inputs[0])


def _add_experts(squares: Squares, model: nn.Module, path: str, expert: int, x: Tensor) -> Tensor:
    stack = stack_named(language_name(path) or path)
    if stack is not None:
        squares.add(stack, len(model.get_parameter(path)), expert, x)
    return x


def _run(model: Any, documents: list[list[int]]) -> None:
    seen = 0
    device = next(model.parameters()).device
    for ids in documents:
        model(torch.tensor([ids], device=device))
        seen += len(ids)
        if seen >= TOKENS:
            return
