"""What an adapter adds to the tensors of its base's files: ``s · B A`` of a layer, or the part of
it that a tensor holds.

A class may make one weight of several tensors: the experts of a layer are one parameter of the
model, and a file has the matrices of each expert by themselves. Which part of the parameter each
tensor is, transformers says: a small stand-in with the same number of experts goes the way that
weights go when they are saved.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from chronicals.formats.part_names import StoredNames
from chronicals.lora.config import LoRAConfig
from chronicals.lora.embedding_layer import LoRAEmbedding
from chronicals.lora.parameter_layer import is_transposed
from chronicals.lora.targets import Target, targets_of
from chronicals.models.loading import load_without_weights

SMALL = 24
"""Rows and columns of a stand-in: a multiple of the numbers of parts that classes divide weights
into.
"""


NO_BLOCK = (
    "is no block of the model's weight; load the adapter, call model.merge_and_unload(), "
    "and save that"
)


@dataclass(frozen=True)
class Part:
    """Which part of a stacked weight a tensor of a file is.

    Attributes:
        expert: its number; None for all of them.
        rows, columns: where it begins and ends, as shares of the matrix's.
        transposed: whether it is the transpose of that.
    """

    expert: int | None = None
    rows: tuple[float, float] = (0.0, 1.0)
    columns: tuple[float, float] = (0.0, 1.0)
    transposed: bool = False

    def of(self, matrix: Tensor) -> Tensor:
        """Of one expert's matrix."""
        (top, bottom) = self.rows
        (left, right) = self.columns
        height, width = matrix.shape
        part = matrix[
            round(top * height) : round(bottom * height), round(left * width) : round(right * width)
        ]
        return part.t() if self.transposed else part


@dataclass(frozen=True)
class Addition:
    """What is added to a tensor of a file.

    Attributes:
        path: of the adapter.
        update: makes it, fp32, in the shape of the tensor.
    """

    path: str
    update: Callable[[], Tensor]


@dataclass(frozen=True)
class Additions:
    """Those of an adapter.

    Attributes:
        folder: of the adapter, for errors.
        described: its ``adapter_config.json``.
        shape: the same as a LoRAConfig.
        read: gives a tensor by its name in the file.
        names: of the tensors, by what they are called in the model.
    """

    folder: Path
    described: Mapping[str, Any]
    shape: LoRAConfig
    read: Callable[[str], Tensor]
    names: Mapping[str, str]

    def by_weight(
        self, paths: Collection[str], there: StoredNames, base: Path
    ) -> dict[str, Addition]:
        """By the names of tensors in files.

        Args:
            paths: of the adapters.
            there: names of the tensors.

        Raises:
            ValueError: one is not there, or is the head's, too.
        """
        embeddings = {path for path in paths if f"{path}.{LoRAEmbedding.MATRICES[0]}" in self.names}
        model = load_without_weights(base) if embeddings or self.shape.target_parameters else None
        alone = replace(self.shape, target_modules=[]) if self.shape.target_parameters else None
        targets = (
            {} if alone is None else {target.path: target for target in targets_of(model, alone)}
        )
        found: dict[str, Addition] = {}
        for path in paths:
            if (target := targets.get(path)) is not None:
                found |= self._of_parameter(model, target, there)
                continue
            if path in embeddings:
                self._refuse_a_tied_head(model, path)
            name = self._find([f"{path}.weight"], there)
            found[name] = Addition(path, partial(self._of_layer, path, path in embeddings))
        return found

    def _find(self, names: list[str], there: StoredNames) -> str:
        """Of a weight in the files."""
        found = there.find(*names)
        if found is None:
            raise ValueError(
                f"{self.folder}: the base has no weight {names[0]} in its files; a head that is "
                "tied to the embedding, or "
                "a layer that the class makes of several tensors, is merged by "
                "model.merge_and_unload() once it is loaded"
            )
        return found

    def _refuse_a_tied_head(self, model: Any, path: str) -> None:
        """Raises ValueError where the embedding's weight is the head's, which would be changed
        with it.
        """
        head = model.get_output_embeddings()
        if head is not None and head.weight is model.get_submodule(path).weight:
            raise ValueError(
                f"{self.folder}: {path} has an adapter, and its weight is that of the head, too, "
                "which has none; load the "
                "adapter, call model.merge_and_unload(), which gives the head a weight of its "
                "own, and save that"
            )

    def _pair(self, path: str, names: tuple[str, str]) -> tuple[Tensor, Tensor]:
        a, b = (self.read(self.names[f"{path}.{name}"]).float() for name in names)
        return a, b

    def _of_layer(self, path: str, is_embedding: bool) -> Tensor:
        down, up = self._pair(
            path, LoRAEmbedding.MATRICES if is_embedding else ("lora_A.weight", "lora_B.weight")
        )
        update = self.shape.at(path).scale * (up @ down)
        return update.t() if is_embedding or self.described.get("fan_in_fan_out") else update

    def _of_parameter(self, model: Any, target: Target, there: StoredNames) -> dict[str, Addition]:
        """Of the parameter's own tensor, or of all that it is made of."""
        parameter: Tensor = model.get_parameter(target.named)
        transposed = parameter.ndim == 3 and is_transposed(model.get_submodule(target.layer))
        experts = len(parameter) if parameter.ndim == 3 else 1

        def update(part: Part) -> Tensor:
            down, up = self._pair(target.path, ("lora_A.weight", "lora_B.weight"))
            down_ERK = down.view(experts, -1, down.shape[1])
            up_ENR = up.view(len(up), -1, experts).permute(2, 0, 1)
            scale = self.shape.at(target.named).scale
            if parameter.ndim == 2:
                return scale * (up_ENR[0] @ down_ERK[0])
            if part.expert is None:
                whole = scale * (up_ENR @ down_ERK)
                return whole.transpose(1, 2) if transposed else whole
            matrix = scale * (up_ENR[part.expert] @ down_ERK[part.expert])
            return part.of(matrix.t() if transposed else matrix)

        parts = {target.named: Part()}
        if target.named not in there:
            parts = parts_in_files(model, target.named, parameter.shape)
        names = {self._find([name], there): part for name, part in parts.items()}
        return {name: Addition(target.path, partial(update, part)) for name, part in names.items()}


def parts_in_files(model: Any, name: str, shape: torch.Size) -> dict[str, Part]:
    """By the names of the tensors that are written of a parameter, stacked or a matrix, when the
    model is saved.

    Raises:
        ValueError: they are not blocks of an expert's matrix.
    """
    from transformers.core_model_loading import revert_weight_conversion

    experts = shape[0] if len(shape) == 3 else 1
    places = torch.arange(experts * SMALL * SMALL).view(experts, SMALL, SMALL)
    stand_in = places if len(shape) == 3 else places[0]
    parts = {}
    for written, tensor in revert_weight_conversion(model, {name: stand_in}).items():
        if torch.equal(tensor, stand_in):
            parts[written] = Part()
            continue
        if tensor.ndim != 2:
            raise ValueError(f"{written} {NO_BLOCK}")
        first = int(tensor[0, 0])
        last = int(tensor[-1, -1])
        expert = first // SMALL**2
        top = first // SMALL % SMALL
        left = first % SMALL
        bottom = last // SMALL % SMALL + 1
        right = last % SMALL + 1
        transposed = tensor.shape != (bottom - top, right - left) or (
            len(tensor) > 1 and int(tensor[1, 0]) != first + SMALL
        )
        block = places[expert, top:bottom, left:right]
        if not torch.equal(tensor, block.t() if transposed else block):
            raise ValueError(f"{written} {NO_BLOCK}")
        parts[written] = Part(
            expert, (top / SMALL, bottom / SMALL), (left / SMALL, right / SMALL), transposed
        )
    return parts
