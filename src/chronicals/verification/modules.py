"""Grouping of weights into modules, the rows of the comparison table.

A module is a layer, one expert of a stack, or one matrix of an adapter.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Size


def plain_name(name: str) -> str:
    """Return the name of a weight in the model without adapters; adapter matrices keep theirs."""
    return (
        name
        if ".lora_" in name
        else ".".join(part for part in name.split(".") if part != "base_layer")
    )


@dataclass(frozen=True)
class Modules:
    """The modules of a model's trained weights.

    Attributes:
        names: path of each module: that of the layer that owns the weights, ``….experts.3`` for one
            of several experts in a tensor, ``….q_proj.lora_A`` for a matrix of an adapter.
        kinds: the same without the indices of layers and experts, ``….layers.*.q_proj``; ``lora_A``
            for every adapter's A.
        routed: bool ``[M]``, True if a module belongs to a block with trained experts.
        sizes: float64 ``[M]``, number of elements.
        places: by name of a weight: the index of its first module, and the number of modules that
            share it along its first dimension.
    """

    names: list[str]
    kinds: list[str]
    routed: torch.Tensor
    sizes: torch.Tensor
    places: dict[str, tuple[int, int]]

    @classmethod
    def of(cls, shapes: Mapping[str, Size]) -> Modules:
        """Group weights, given their shapes by name."""
        names: dict[str, int] = {}
        sizes: list[int] = []
        places = {}
        for weight, shape in shapes.items():
            owner, _, last = weight.rpartition(".")
            several = len(shape) == 3 and owner.rpartition(".")[2] == "experts"
            own = (
                [f"{owner}.{n}" for n in range(shape[0])]
                if several
                else [weight if last.startswith("lora_") else owner]
            )
            for name in own:
                if name not in names:
                    names[name] = len(sizes)
                    sizes.append(0)
                sizes[names[name]] += shape.numel() // len(own)
            places[weight] = (names[own[0]], len(own))
        kinds = [
            re.sub(r".*\.(?=lora_)", "", re.sub(r"\.\d+(?=\.|$)", ".*", name)) for name in names
        ]
        blocks = tuple(
            {name.partition(".experts.")[0] + "." for name in names if ".experts." in name}
        )
        routed = torch.tensor([name.startswith(blocks) for name in names])
        return cls(list(names), kinds, routed, torch.tensor(sizes, dtype=torch.float64), places)
