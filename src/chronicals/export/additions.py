"""Products ``s · B A`` that an adapter adds to the tensors of its base's files, or parts of them.

A class may make one weight of several tensors: the experts of a layer are one parameter of the
model, and a file has the matrices of each expert. transformers tells which part of the parameter
each tensor is: a small stand-in with the same number of experts is saved like the parameter, and
its values tell where each of them went.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from chronicals.formats.tensor_names import StoredNames
from chronicals.lora.config import LoRAConfig
from chronicals.lora.layers import LoRAEmbedding
from chronicals.lora.parameter_layer import is_transposed
from chronicals.lora.targets import Target, targets_of
from chronicals.models.loading import load_without_weights

STAND_IN_SIZE = 24
"""Rows and columns of a stand-in, a multiple of the numbers of parts that classes split weights
into.
"""


NO_BLOCK_REMEDY = (
    "is no block of the model's weight; load the adapter, call model.merge_and_unload(), "
    "and save that"
)


@dataclass(frozen=True)
class Part:
    """The part of a stacked weight that a tensor of a file holds.

    Attributes:
        expert: its number; None for all experts.
        rows: begin and end, as ratios of the matrix's rows.
        columns: begin and end, as ratios of the matrix's columns.
        transposed: the tensor is the transpose of the part.
    """

    expert: int | None = None
    rows: tuple[float, float] = (0.0, 1.0)
    columns: tuple[float, float] = (0.0, 1.0)
    transposed: bool = False

    def of(self, matrix: Tensor) -> Tensor:
        """Return the part of one expert's matrix."""
        (top, bottom) = self.rows
        (left, right) = self.columns
        height, width = matrix.shape
        part = matrix[
            round(top * height) : round(bottom * height), round(left * width) : round(right * width)
        ]
        return part.t() if self.transposed else part


@dataclass(frozen=True)
class Addition:
    """A product that is added to a tensor of a file.

    Attributes:
        path: of the adapter.
        update: computes it, fp32, in the shape of the tensor.
    """

    path: str
    update: Callable[[], Tensor]


@dataclass(frozen=True)
class Additions:
    """The products that an adapter adds.

    Attributes:
        folder: of the adapter, for errors.
        described: its ``adapter_config.json``.
        shape: the same as a LoRAConfig.
        read: returns a tensor by its name in the file.
        names: of the tensors in the file, by their names in the model.
    """

    folder: Path
    described: Mapping[str, Any]
    shape: LoRAConfig
    read: Callable[[str], Tensor]
    names: Mapping[str, str]

    def by_weight(
        self, paths: Collection[str], there: StoredNames, base: Path
    ) -> dict[str, Addition]:
        """Return the products by the names of the tensors in the base's files.

        Args:
            paths: of the adapted layers, embeddings and parameters.
            there: names of the base's tensors.
            base: folder of the base.

        Raises:
            ValueError: a tensor is missing, or is the head's as well.
        """
        embeddings = {path for path in paths if f"{path}.{LoRAEmbedding.MATRICES[0]}" in self.names}
        has_parameters = bool(self.shape.target_parameters)
        model = load_without_weights(base) if embeddings or has_parameters else None
        targets = {}
        if has_parameters:
            parameters_only = replace(self.shape, target_modules=[])
            targets = {target.path: target for target in targets_of(model, parameters_only)}
        additions: dict[str, Addition] = {}
        for path in paths:
            target = targets.get(path)
            if target is not None:
                additions |= self._of_parameter(model, target, there)
                continue
            if path in embeddings:
                self._refuse_a_tied_head(model, path)
            name = self._find(f"{path}.weight", there)
            additions[name] = Addition(path, partial(self._of_layer, path, path in embeddings))
        return additions

    def _find(self, weight: str, there: StoredNames) -> str:
        """Return the name in the files of a weight; raises ValueError if it is missing."""
        name = there.find(weight)
        if name is None:
            raise ValueError(
                f"{self.folder}: the base has no weight {weight} in its files; a head that is "
                "tied to the embedding, or a layer that the class makes of several tensors, is "
                "merged by model.merge_and_unload() once it is loaded"
            )
        return name

    def _refuse_a_tied_head(self, model: Any, path: str) -> None:
        """Raise ValueError if the head has the embedding's weight, and would be changed with it."""
        head = model.get_output_embeddings()
        if head is not None and head.weight is model.get_submodule(path).weight:
            raise ValueError(
                f"{self.folder}: {path} has an adapter, and its weight is that of the head, too, "
                "which has none; load the adapter, call model.merge_and_unload(), which gives the "
                "head a weight of its own, and save that"
            )

    def _pair(self, path: str, names: tuple[str, str]) -> tuple[Tensor, Tensor]:
        """Read the two matrices of an adapter, fp32."""
        a, b = (self.read(self.names[f"{path}.{name}"]).float() for name in names)
        return a, b

    def _of_layer(self, path: str, is_embedding: bool) -> Tensor:
        """Compute the product of a layer or an embedding."""
        names = LoRAEmbedding.MATRICES if is_embedding else ("lora_A.weight", "lora_B.weight")
        down, up = self._pair(path, names)
        update = self.shape.at(path).scale * (up @ down)
        return update.t() if is_embedding or self.described.get("fan_in_fan_out") else update

    def _of_parameter(self, model: Any, target: Target, there: StoredNames) -> dict[str, Addition]:
        """Return the products of a parameter's tensor, or of all tensors that it is made of."""
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
        names = {self._find(name, there): part for name, part in parts.items()}
        return {name: Addition(target.path, partial(update, part)) for name, part in names.items()}


def parts_in_files(model: Any, name: str, shape: torch.Size) -> dict[str, Part]:
    """Return the parts of a parameter by the names of the tensors in which it is saved.

    Args:
        model: on the meta device.
        name: of the parameter.
        shape: of the parameter, a matrix or a stack of matrices.

    Raises:
        ValueError: they are not blocks of an expert's matrix.
    """
    from transformers.core_model_loading import revert_weight_conversion

    experts = shape[0] if len(shape) == 3 else 1
    places = torch.arange(experts * STAND_IN_SIZE * STAND_IN_SIZE).view(
        experts, STAND_IN_SIZE, STAND_IN_SIZE
    )
    stand_in = places if len(shape) == 3 else places[0]
    parts = {}
    for written, tensor in revert_weight_conversion(model, {name: stand_in}).items():
        if torch.equal(tensor, stand_in):
            parts[written] = Part()
            continue
        if tensor.ndim != 2:
            raise ValueError(f"{written} {NO_BLOCK_REMEDY}")
        first = int(tensor[0, 0])
        last = int(tensor[-1, -1])
        expert = first // STAND_IN_SIZE**2
        top = first // STAND_IN_SIZE % STAND_IN_SIZE
        left = first % STAND_IN_SIZE
        bottom = last // STAND_IN_SIZE % STAND_IN_SIZE + 1
        right = last % STAND_IN_SIZE + 1
        transposed = tensor.shape != (bottom - top, right - left) or (
            len(tensor) > 1 and int(tensor[1, 0]) != first + STAND_IN_SIZE
        )
        block = places[expert, top:bottom, left:right]
        if not torch.equal(tensor, block.t() if transposed else block):
            raise ValueError(f"{written} {NO_BLOCK_REMEDY}")
        parts[written] = Part(
            expert,
            (top / STAND_IN_SIZE, bottom / STAND_IN_SIZE),
            (left / STAND_IN_SIZE, right / STAND_IN_SIZE),
            transposed,
        )
    return parts
