"""Importance of the columns of weights: the mean square of their inputs over a user's own rows.

llama.cpp weighs the error of quantising by it (an importance matrix). Each expert is measured by
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

from chronicals.formats.gguf.tensors import TensorPiece
from chronicals.formats.tensor_names import Expert, language_name, stack_named
from chronicals.models.routed_experts import watch_experts

logger = logging.getLogger(__name__)

MAX_MEASURED_TOKENS = 1 << 16
"""Tokens after which measuring ends."""


class ColumnSquares:
    """Sums of squares of inputs by column, of stacks of matrices; a linear layer is a stack of one.

    Attributes:
        sums: fp64 ``[matrices, in]``, by stack.
        rows: how many inputs each matrix of a stack had, ``[matrices, 1]``, by stack.
    """

    def __init__(self) -> None:
        self.sums: dict[Hashable, Tensor] = {}
        self.rows: dict[Hashable, Tensor] = {}

    def add(self, stack: Hashable, matrices: int, number: int, x: Tensor) -> None:
        """Add inputs of a matrix.

        Args:
            stack: the stack's key.
            matrices: how many matrices the stack has.
            number: of the matrix in the stack.
            x: ``[..., in]``.
        """
        flat = x.reshape(-1, x.shape[-1]).float()
        if stack not in self.sums:
            self.sums[stack] = torch.zeros(matrices, flat.shape[1], dtype=torch.float64)
            self.rows[stack] = torch.zeros(matrices, 1, dtype=torch.float64)
        self.sums[stack][number] += flat.square().sum(0).double().cpu()
        self.rows[stack][number] += len(flat)


@torch.no_grad()
def importance_of(
    model: Any, pieces: list[TensorPiece], documents: list[list[int]]
) -> dict[str, np.ndarray]:
    """Measure the importance of columns, fp32, by the name of a tensor in the file.

    It is ``[in]`` for the weight of a linear layer, ``[E, in]`` for experts.

    Args:
        model: whose modules have the names of the pieces' sources, except for the prefix of a
            language part.
        pieces: of the file, with the names of the model's weights that they are made of.
        documents: token ids; the first ``MAX_MEASURED_TOKENS`` are taken.
    """
    squares = ColumnSquares()
    layers = {
        language_name(name) or name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    }
    stacks: dict[str, Hashable] = {}
    for piece in pieces:
        source = piece.sources[0]
        expert = Expert.named(source)
        expert_stack = stack_named(source) if expert is None else expert.stack
        path = source.removesuffix(".weight")
        if expert_stack is not None and not piece.name.endswith(".bias"):
            stacks[piece.name] = expert_stack
        elif path in layers and len(piece.sources) == 1:
            stacks[piece.name] = path
    paths = {path for path in stacks.values() if isinstance(path, str)}
    hooks = [
        layers[path].register_forward_pre_hook(
            lambda layer, inputs, path=path: squares.add(path, 1, 0, inputs[0])  # type: ignore[misc]
        )
        for path in sorted(paths)
    ]
    undo = watch_experts(model, partial(_add_experts, squares, model))
    try:
        tokens = 0
        device = next(model.parameters()).device
        for ids in documents:
            model(torch.tensor([ids], device=device))
            tokens += len(ids)
            if tokens >= MAX_MEASURED_TOKENS:
                break
    finally:
        undo()
        for hook in hooks:
            hook.remove()
    # Matrices in stacks of which others had inputs.
    unseen = sum(int((rows == 0).sum()) for rows in squares.rows.values())
    if unseen:
        logger.info(
            "importance: %d matrices of experts saw none of the rows; their columns count alike",
            unseen,
        )
    importance = {}
    for name, place in stacks.items():
        if place not in squares.sums:
            continue
        rows = squares.rows[place]
        # A matrix without inputs gets ones, so that its columns count equally.
        mean = torch.where(rows > 0, squares.sums[place] / rows.clamp(min=1), 1.0).float().numpy()
        importance[name] = mean[0] if isinstance(place, str) else mean
    return importance


def _add_experts(
    squares: ColumnSquares, model: nn.Module, path: str, expert: int, x: Tensor
) -> Tensor:
    stack = stack_named(language_name(path) or path)
    if stack is not None:
        squares.add(stack, len(model.get_parameter(path)), expert, x)
    return x
