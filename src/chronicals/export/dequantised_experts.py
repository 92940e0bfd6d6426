"""Stacked experts of a base with the values that an adapter over 4 bits saw, by tensors of files.

The scales of a stack are quantised together. So a stack is quantised whole, from all its tensors,
when one of them is asked for; the stacks of a decoder layer stay in memory meanwhile.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from chronicals.export.additions import Part, parts_in_files
from chronicals.formats.tensor_names import StoredNames
from chronicals.formats.weight_files import StoredTensor
from chronicals.models.base_format import BaseFormat, FourBits
from chronicals.models.four_bits import stacked_experts

CACHED_STACKS = 2
"""Stacks of a decoder layer, whose tensors alternate in files."""


class DequantisedExperts:
    """Values of quantised stacks of experts.

    Args:
        stacks: their shapes ``(E, N, K)``, by their names in the model.
        parts: of each stack, by the names of the tensors that hold it.
        stored: tensors of files, by name.
        kinds: quantisation of each stack, by its name in the model.
    """

    def __init__(
        self,
        stacks: Mapping[str, tuple[int, ...]],
        parts: Mapping[str, Mapping[str, Part]],
        stored: Mapping[str, StoredTensor],
        kinds: Mapping[str, FourBits],
    ):
        self.stacks = stacks
        self.parts = parts
        self.stored = stored
        self.kinds = kinds
        self._owners = {name: stack for stack, inside in parts.items() for name in inside}
        self._values = functools.lru_cache(CACHED_STACKS)(self._dequantised)

    @classmethod
    def of(
        cls, model: Any, there: StoredNames, stored: Mapping[str, StoredTensor], form: BaseFormat
    ) -> DequantisedExperts:
        """Find the stacks of a base that were quantised.

        Args:
            model: the base, on the meta device.
            there: names of the tensors of its files.
            stored: these tensors.
            form: quantisation of the base.

        Raises:
            ValueError: a stack is not in the files, or not made of blocks of their tensors.
        """
        stacks = {}
        parts = {}
        kinds = {}
        for path, module in stacked_experts(model).items():
            kind = form.kind_of(path)
            for own, parameter in module.named_parameters(recurse=False):
                if kind is not None and parameter.ndim == 3:
                    name = f"{path}.{own}"
                    stacks[name] = tuple(parameter.shape)
                    kinds[name] = kind
                    parts[name] = _stored_parts(model, name, parameter.shape, there)
        return cls(stacks, parts, stored, kinds)

    def __contains__(self, name: object) -> bool:
        return name in self._owners

    @property
    def names(self) -> set[str]:
        """Names of the tensors in files."""
        return set(self._owners)

    def read(self, name: str) -> Tensor:
        """Return the values of a tensor of the files, fp32, in its shape.

        Raises:
            ValueError: a tensor of its stack is quantised in the files, or of another shape.
        """
        stack = self._owners[name]
        return _within(self._values(stack), self.parts[stack][name]).float()

    def _dequantised(self, stack: str) -> Tensor:
        kind = self.kinds[stack]
        source = next(self.stored[name].read().dtype for name in self.parts[stack])
        whole = torch.empty(self.stacks[stack], dtype=source)
        for name, part in self.parts[stack].items():
            value = self.stored[name].read()
            place = _within(whole, part)
            if value.shape != place.shape:
                shapes = f"{list(value.shape)} there, {list(place.shape)} here"
                raise ValueError(f"{name} ({shapes}): of another shape than config.json says")
            place.copy_(value)
        return kind.values(whole.reshape(-1, whole.shape[-1])).view(whole.shape)


def _within(whole: Tensor, part: Part) -> Tensor:
    """Return the view of a stack that a part is."""
    return whole if part.expert is None else part.of(whole[part.expert])


def _stored_parts(model: Any, name: str, shape: torch.Size, there: StoredNames) -> dict[str, Part]:
    parts = {name: Part()} if there.find(name) is not None else parts_in_files(model, name, shape)
    named = {there.find(written): part for written, part in parts.items()}
    if None in named:
        raise ValueError(
            f"the base was in 4 bits, and its files have no weight {name}, nor the parts that it "
            "is saved as"
        )
    return {found: part for found, part in named.items() if found is not None}
