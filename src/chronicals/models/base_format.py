"""The format of the weights beneath adapters, read off the model that has them.

An adapter is trained over numbers, and its folder names the files that these came from. Where
layers were quantised after their weights were read, those files hold other numbers: how each layer
was quantised is written beside the adapter, and what loads, merges or exports it makes the same
numbers again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from chronicals.models.peft_kinds import within_adapters
from chronicals.quantization import Experts4bit, Packed, PackedLinear
from chronicals.quantization.bitsandbytes_layer import is_of_bitsandbytes, weight_of_layer
from chronicals.quantization.nf4 import BLOCK

BESIDE_ADAPTERS = "base_layer"
"""Name by which adapters, ours and PEFT's, hold the layer that they are around."""

OLDER = {
    "bf16": ("bfloat16", "bfloat16"),
    "fp16": ("float32", "float16"),
    "fp32": ("float32", "float32"),
}
"""Dtypes before quantising and of products, by ``mixed_precision``, in folders that state
nothing else of a base in NF4.
"""


class OtherBase(ValueError):
    """A model's layers are quantised otherwise than those that an adapter was trained over."""


@dataclass(frozen=True)
class FourBits:
    """How the weight of a layer was quantised to 4 bits.

    Attributes:
        code: ``nf4`` or ``fp4``.
        block: values that share a scale.
        scale_block: scales that share one of theirs; None where they are not quantised.
        quantized_from: dtype that the weight had before; None where that is not known.
        products: dtype that it is dequantised to.
    """

    code: str = "nf4"
    block: int = BLOCK
    scale_block: int | None = 256
    quantized_from: str | None = None
    products: str = "float32"

    @classmethod
    def of(cls, weight: Any, products: torch.dtype) -> FourBits:
        """Of a weight in 4 bits, of whose values a process may hold a part."""
        scales = weight.scales
        source = None if weight.quantized_from is None else _name(weight.quantized_from)
        return cls(
            weight.code,
            weight.block,
            scales.block2 if scales.nested else None,
            source,
            _name(products),
        )

    def quantise(self, weight: Tensor) -> Packed:
        """The weight ``[n, K]``, quantised as it says, from the dtype that it says."""
        source = (
            weight.dtype if self.quantized_from is None else getattr(torch, self.quantized_from)
        )
        return Packed.of(weight.to(source), self.block, self.scale_block is not None, self.code)

    def values(self, weight: Tensor) -> Tensor:
        """What products read of the weight after it was quantised, fp32."""
        return self.quantise(weight).to(getattr(torch, self.products)).dense().float()

    def __str__(self) -> str:
        nested = "" if self.scale_block is None else f" with scales in blocks of {self.scale_block}"
        return f"{self.code.upper()} in blocks of {self.block}{nested}"


@dataclass(frozen=True)
class BaseFormat:
    """The quantised layers of a model by their paths without adapters; all others are in 16 or 32
    bit.

    Attributes:
        layers: linear layers; None where a folder does not name them, and they are those that
            ``load_model`` quantises.
        experts: modules with stacked weights.
        usual: how all are quantised that are not named.
        by_transformers: ``quantization_config`` of layers that transformers quantised, to something
            else than 4 bits.
    """

    layers: Mapping[str, FourBits] | None = field(default_factory=dict)
    experts: Mapping[str, FourBits] | None = field(default_factory=dict)
    usual: FourBits = field(default_factory=FourBits)
    by_transformers: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, model: Any) -> BaseFormat | None:
        """What a model's layers are; None where none is quantised, or all are in the blocks of a
        GGUF file.
        """
        inner = within_adapters(model)
        layers = dict(_linear_layers(inner))
        experts = {
            without_adapters(path): FourBits.of(
                module.packed(next(iter(module.stacked))), module.dtype
            )
            for path, module in inner.named_modules()
            if isinstance(module, Experts4bit)
        }
        theirs = None if layers else _described_by_transformers(inner)
        if not layers and not experts and theirs is None:
            return None
        return cls(layers, experts, by_transformers=theirs)

    @classmethod
    def read(cls, stated: Mapping[str, Any] | None) -> BaseFormat | None:
        """The format in ``to_json``'s words, or in those of older folders: NF4, and the
        ``mixed_precision`` of the run.
        """
        if not stated:
            return None
        if "mixed_precision" in stated:
            source, products = OLDER[stated["mixed_precision"]]
            return cls(None, None, FourBits(quantized_from=source, products=products))
        found: dict[str, dict[str, FourBits]] = {"layers": {}, "experts": {}}
        for group in stated.get("in_4_bits", ()):
            kind = FourBits(**{name: value for name, value in group.items() if name not in found})
            for which, paths in found.items():
                paths.update(dict.fromkeys(group.get(which, ()), kind))
        return cls(
            layers=found["layers"],
            experts=found["experts"],
            by_transformers=stated.get("by_transformers"),
        )

    def to_json(self) -> dict[str, Any]:
        """Plain JSON: each way of quantising once, with the layers that have it."""
        assert self.layers is not None and self.experts is not None
        kinds = list(dict.fromkeys([*self.layers.values(), *self.experts.values()]))
        groups = [
            {
                **asdict(kind),
                "layers": _paths(self.layers, kind),
                "experts": _paths(self.experts, kind),
            }
            for kind in kinds
        ]
        theirs = (
            {} if self.by_transformers is None else {"by_transformers": dict(self.by_transformers)}
        )
        return {**({"in_4_bits": groups} if groups else {}), **theirs}

    def kind_of(self, path: str) -> FourBits | None:
        """How a linear layer is quantised; None where it is not."""
        return self.usual if self.layers is None else self.layers.get(path)

    def kind_of_experts(self, path: str) -> FourBits | None:
        """How stacked experts are quantised; None where they are not."""
        return self.usual if self.experts is None else self.experts.get(path)

    @property
    def in_8_bits(self) -> bool:
        """Whether layers are bitsandbytes' in LLM.int8."""
        described = self.by_transformers or {}
        return bool(described.get("load_in_8bit") or described.get("_load_in_8bit"))

    @property
    def kinds(self) -> set[FourBits]:
        """All ways in which layers are quantised."""
        if self.layers is None or self.experts is None:
            return {self.usual}
        return {*self.layers.values(), *self.experts.values()}

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype in which weights are to be read: the one from which all were quantised, or
        fp32, which holds what any held; None where it is not known."""
        names = {kind.quantized_from for kind in self.kinds}
        known = [getattr(torch, name) for name in names if name is not None]
        return (known[0] if len(known) == 1 else torch.float32) if known else None

    def difference(self, other: BaseFormat | None) -> str | None:
        """In what another model's layers are quantised otherwise, but for the dtype of products;
        None where in nothing.
        """
        if other is None:
            return f"{self} there, nothing is quantised here"
        if self.by_transformers is not None or other.by_transformers is not None:
            return None if str(self) == str(other) else f"{self} there, {other} here"
        for which in ("layers", "experts"):
            there = getattr(self, which)
            here = getattr(other, which)
            if there is None or here is None:  # an older folder, which names none
                continue
            for path in sorted(there.keys() | here.keys()):
                if not _same_codes(there.get(path), here.get(path)):
                    return (
                        f"{path} is {_in_words(there.get(path))} there, "
                        f"{_in_words(here.get(path))} here"
                    )
        return None

    def __str__(self) -> str:
        if self.by_transformers is not None:
            bits = " in 8 bits" if self.in_8_bits else ""
            return (
                "layers that transformers quantised by "
                f"{self.by_transformers.get('quant_method')}{bits}"
            )
        return " and ".join(sorted({str(kind) for kind in self.kinds}))

    @property
    def code(self) -> str:
        """Name of the codes in words, as ``NF4``."""
        return " and ".join(sorted({kind.code.upper() for kind in self.kinds}))


def _linear_layers(model: nn.Module) -> Iterator[tuple[str, FourBits]]:
    """Linear layers in 4 bits, ours or bitsandbytes', by their paths without adapters."""
    for path, module in model.named_modules():
        if is_of_bitsandbytes(module):
            weight = weight_of_layer(module)
            products: Any = module.compute_dtype
            yield without_adapters(path), FourBits.of(weight, products or weight.dtype)
        elif isinstance(module, PackedLinear) and module.in_4_bits:
            yield without_adapters(path), FourBits.of(module.four_bits, module.dtype)


def _described_by_transformers(model: Any) -> dict[str, Any] | None:
    """``quantization_config`` of a model that transformers quantised by layers of its own."""
    config = getattr(model.config, "quantization_config", None)
    if config is None or not getattr(model, "is_quantized", False):
        return None
    described = dict(config) if isinstance(config, dict) else dict(config.to_dict())
    method = described.get("quant_method")
    return {
        **json.loads(json.dumps(described, default=str)),
        "quant_method": str(getattr(method, "value", method)),
    }


def without_adapters(path: str) -> str:
    """The path that a module has in a model without adapters."""
    return ".".join(part for part in path.split(".") if part != BESIDE_ADAPTERS)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _paths(kinds: Mapping[str, FourBits], kind: FourBits) -> Sequence[str]:
    return [path for path, found in kinds.items() if found == kind]


def _same_codes(one: FourBits | None, other: FourBits | None) -> bool:
    """Whether a weight has the same codes, as far as is known."""
    if one is None or other is None:
        return one is other
    source = one.quantized_from or other.quantized_from
    unlike = other.quantized_from not in (None, source)
    return not unlike and replace(one, products="", quantized_from="") == replace(
        other, products="", quantized_from=""
    )


def _in_words(kind: FourBits | None) -> str:
    if kind is None:
        return "in 16 or 32 bit"
    source = "" if kind.quantized_from is None else f", quantised from {kind.quantized_from}"
    return f"{kind}{source}"
