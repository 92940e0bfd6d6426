"""Products that an adapter adds to the tensors of its base's files, and the experts that it saw.

It adds a product ``s · B A`` to a tensor, or to a part of one.

A class may make one weight of several tensors: the experts of a layer are one parameter of the
model, and a file has the matrices of each expert. transformers tells which part of the parameter
each tensor is: a small stand-in with the same number of experts is saved like the parameter, and
its values tell where each of them went.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from chronicals.formats.tensor_names import StoredNames
from chronicals.formats.weight_files import StoredTensor
from chronicals.lora.config import LoRAConfig
from chronicals.lora.layers import LoRAEmbedding
from chronicals.lora.parameter_layer import is_transposed
from chronicals.lora.targets import Target, targets_of
from chronicals.models.base_format import BaseFormat, FourBits
from chronicals.models.four_bits import stacked_experts
from chronicals.models.loading import load_without_weights

STAND_IN_SIZE = 24
"""Rows and columns of a stand-in, a multiple of the numbers of parts that classes split weights
into.
"""

CACHED_STACKS = 2
"""Stacks of a decoder layer, whose tensors alternate in files."""

NO_BLOCK_REMEDY = (
    "is no block of the model's weight; load the adapter, call model.merge_and_unload(), "
    "and save that"
)


@dataclass(frozen=True)
class StoredPart:
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
class AddedProduct:
    """A product that is added to a tensor of a file.

    Attributes:
        path: of the adapter.
        update: computes it, fp32, in the shape of the tensor.
    """

    path: str
    update: Callable[[], Tensor]


@dataclass(frozen=True)
class AddedProducts:
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
    ) -> dict[str, AddedProduct]:
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
        model: Any = load_without_weights(base) if embeddings or has_parameters else None
        targets = {}
        if has_parameters:
            parameters_only = replace(self.shape, target_modules=[])
            targets = {target.path: target for target in targets_of(model, parameters_only)}
        additions: dict[str, AddedProduct] = {}
        for path in paths:
            target = targets.get(path)
            if target is not None:
                additions |= self._of_parameter(model, target, there)
                continue
            head = model.get_output_embeddings() if path in embeddings else None
            if head is not None and head.weight is model.get_submodule(path).weight:
                raise ValueError(
                    f"{self.folder}: {path} has an adapter, and its weight is that of the head, "
                    "too, which has none; load the adapter, call model.merge_and_unload(), which "
                    "gives the head a weight of its own, and save that"
                )
            name = self._find(f"{path}.weight", there)
            additions[name] = AddedProduct(
                path, functools.partial(self._of_layer, path, path in embeddings)
            )
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

    def _of_layer(self, path: str, is_embedding: bool) -> Tensor:
        """Compute the product of a layer or an embedding."""
        names = LoRAEmbedding.MATRICES if is_embedding else ("lora_A.weight", "lora_B.weight")
        down, up = (self.read(self.names[f"{path}.{name}"]).float() for name in names)
        update = self.shape.at(path).scale * (up @ down)
        return update.t() if is_embedding or self.described.get("fan_in_fan_out") else update

    def _of_parameter(
        self, model: Any, target: Target, there: StoredNames
    ) -> dict[str, AddedProduct]:
        """Return the products of a parameter's tensor, or of all tensors that it is made of."""
        parameter: Tensor = model.get_parameter(target.named)
        transposed = parameter.ndim == 3 and is_transposed(model.get_submodule(target.layer))
        experts = len(parameter) if parameter.ndim == 3 else 1

        def update(part: StoredPart) -> Tensor:
            down = self.read(self.names[f"{target.path}.lora_A.weight"]).float()
            up = self.read(self.names[f"{target.path}.lora_B.weight"]).float()
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

        parts = {target.named: StoredPart()}
        if target.named not in there.names:
            parts = parts_in_files(model, target.named, parameter.shape)
        names = {self._find(name, there): part for name, part in parts.items()}
        return {
            name: AddedProduct(target.path, functools.partial(update, part))
            for name, part in names.items()
        }


def parts_in_files(model: Any, name: str, shape: torch.Size) -> dict[str, StoredPart]:
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
            parts[written] = StoredPart()
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
        parts[written] = StoredPart(
            expert,
            (top / STAND_IN_SIZE, bottom / STAND_IN_SIZE),
            (left / STAND_IN_SIZE, right / STAND_IN_SIZE),
            transposed,
        )
    return parts


class DequantisedExperts:
    """Stacked experts of a base with the values that an adapter over 4 bits saw.

    They are read by the tensors of the base's files.

    The scales of a stack are quantised together. So a stack is quantised whole, from all its
    tensors, when one of them is asked for; the stacks of a decoder layer stay in memory meanwhile.

    Args:
        model: the base, on the meta device.
        there: names of the tensors of its files.
        stored: these tensors, by name.
        form: quantisation of the base.

    Attributes:
        stacks: shapes ``(E, N, K)`` of those that were quantised, by their names in the model.
        parts: of each stack, by the names of the tensors that hold it.
        kinds: quantisation of each stack, by its name in the model.
        owners: name of the stack that a tensor is a part of, by the tensor's name.

    Raises:
        ValueError: a stack is not in the files, or not made of blocks of their tensors.
    """

    def __init__(
        self, model: Any, there: StoredNames, stored: Mapping[str, StoredTensor], form: BaseFormat
    ):
        self.stored = stored
        self.stacks: dict[str, tuple[int, ...]] = {}
        self.parts: dict[str, dict[str, StoredPart]] = {}
        self.kinds: dict[str, FourBits] = {}
        self.owners: dict[str, str] = {}
        self._values = functools.lru_cache(CACHED_STACKS)(self._dequantised)
        for path, module in stacked_experts(model).items():
            kind = form.kind_of(path)
            for own, parameter in module.named_parameters(recurse=False):
                if kind is None or parameter.ndim != 3:
                    continue
                name = f"{path}.{own}"
                self.stacks[name] = tuple(parameter.shape)
                self.kinds[name] = kind
                written = {name: StoredPart()}
                if there.find(name) is None:
                    written = parts_in_files(model, name, parameter.shape)
                self.parts[name] = {}
                for part_name, part in written.items():
                    found = there.find(part_name)
                    if found is None:
                        raise ValueError(
                            f"the base was in 4 bits, and its files have no weight {name}, nor "
                            "the parts that it is saved as"
                        )
                    self.parts[name][found] = part
                    self.owners[found] = name

    def read(self, name: str) -> Tensor:
        """Return the values of a tensor of the files, fp32, in its shape.

        Raises:
            ValueError: a tensor of its stack is quantised in the files, or of another shape.
        """
        stack = self.owners[name]
        part = self.parts[stack][name]
        values = self._values(stack)
        return (values if part.expert is None else part.of(values[part.expert])).float()

    def _dequantised(self, stack: str) -> Tensor:
        kind = self.kinds[stack]
        source = next(self.stored[name].read().dtype for name in self.parts[stack])
        whole = torch.empty(self.stacks[stack], dtype=source)
        for name, part in self.parts[stack].items():
            value = self.stored[name].read()
            place = whole if part.expert is None else part.of(whole[part.expert])
            if value.shape != place.shape:
                shapes = f"{list(value.shape)} there, {list(place.shape)} here"
                raise ValueError(f"{name} ({shapes}): of another shape than config.json says")
            place.copy_(value)
        return kind.values(whole.reshape(-1, whole.shape[-1])).view(whole.shape)
