"""The quantisation of the base weights under an adapter, as stored in the adapter's folder.

An adapter fits the weight values that it was trained with, and its folder names the files of the
base model. If layers were quantised after loading, these files hold other values. The folder of the
adapter therefore states how each layer was quantised, and loading, merging and export repeat it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from chronicals.models.peft_kinds import within_adapters
from chronicals.quantization import FourBits, packed_experts, packed_modules
from chronicals.quantization.bitsandbytes import recipe_of_layer

BESIDE_ADAPTERS = "base_layer"
"""Attribute in which an adapter layer, ours or PEFT's, holds the layer that it wraps."""

OLDER = {
    "bf16": ("bfloat16", "bfloat16"),
    "fp16": ("float32", "float16"),
    "fp32": ("float32", "float32"),
}
"""Dtype before quantisation and dtype of products, by ``mixed_precision``.

For older adapter folders, which state nothing else about a base in NF4.
"""


class OtherBase(ValueError):
    """A model's layers are quantised differently from those that an adapter was trained with."""


@dataclass(frozen=True)
class BaseFormat:
    """The quantised layers of a model, by path without adapters; all others are in 16 or 32 bit.

    Attributes:
        layers: linear layers; None if the folder does not name them: those that ``load_model``
            quantises.
        experts: modules with stacked weights; None as for ``layers``.
        usual: the format of layers that are not named.
        by_transformers: ``quantization_config`` of layers that transformers quantised to another
            format than 4 bits.
    """

    layers: Mapping[str, FourBits] | None = field(default_factory=dict)
    experts: Mapping[str, FourBits] | None = field(default_factory=dict)
    usual: FourBits = field(default_factory=FourBits)
    by_transformers: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, model: Any) -> BaseFormat | None:
        """Return the format of a model's layers.

        None if no layer is quantised, or if the model's files store the quantised codes themselves.
        """
        inner = within_adapters(model)
        layers = {}
        for path, module in inner.named_modules():
            recipe = recipe_of_layer(module)  # of a linear layer in 4 bits, ours or bitsandbytes'
            if recipe is not None:
                layers[path_without_adapters(path)] = recipe
        experts = {
            path_without_adapters(path): module.recipe
            for path, module in packed_experts(inner)
            if module.recipe is not None
        }
        ours = bool(layers) or next(packed_modules(inner), None) is not None
        theirs = None
        config = getattr(inner.config, "quantization_config", None)
        if not ours and config is not None and getattr(inner, "is_quantized", False):
            # transformers quantised the model itself.
            described = dict(config) if isinstance(config, dict) else dict(config.to_dict())
            method = described.get("quant_method")
            theirs = json.loads(json.dumps(described, default=str))
            theirs["quant_method"] = str(getattr(method, "value", method))
        if not layers and not experts and theirs is None:
            return None
        return cls(layers, experts, by_transformers=theirs)

    @classmethod
    def read(cls, stated: Mapping[str, Any] | None) -> BaseFormat | None:
        """Parse the output of ``to_json`` or the statement of an older folder; None if it is empty.

        Older folders state only the ``mixed_precision`` of the run, and mean NF4.
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
        """Return plain JSON that lists each format once, with its layers."""
        assert self.layers is not None and self.experts is not None
        kinds = list(dict.fromkeys([*self.layers.values(), *self.experts.values()]))
        groups = [
            {
                **asdict(kind),
                "layers": [path for path, found in self.layers.items() if found == kind],
                "experts": [path for path, found in self.experts.items() if found == kind],
            }
            for kind in kinds
        ]
        theirs = (
            {} if self.by_transformers is None else {"by_transformers": dict(self.by_transformers)}
        )
        return {**({"in_4_bits": groups} if groups else {}), **theirs}

    def kind_of(self, path: str) -> FourBits | None:
        """Return the format of a linear layer or stacked experts; None if it is not quantised."""
        if self.layers is None or self.experts is None:
            return self.usual
        return self.layers.get(path) or self.experts.get(path)

    @property
    def in_8_bits(self) -> bool:
        """True if the layers are bitsandbytes' layers for LLM.int8."""
        described = self.by_transformers or {}
        return bool(described.get("load_in_8bit") or described.get("_load_in_8bit"))

    @property
    def kinds(self) -> set[FourBits]:
        """All formats that occur among the layers."""
        if self.layers is None or self.experts is None:
            return {self.usual}
        return {*self.layers.values(), *self.experts.values()}

    def difference(self, other: BaseFormat | None) -> str | None:
        """Describe how another model's layers are quantised differently; None if they are not.

        The dtype of products is not compared.
        """
        if other is None:
            return f"{self} there, nothing is quantised here"
        if self.by_transformers is not None or other.by_transformers is not None:
            return None if str(self) == str(other) else f"{self} there, {other} here"
        for which in ("layers", "experts"):
            there = getattr(self, which)
            here = getattr(other, which)
            if there is None or here is None:  # an older folder names no layers
                continue
            for path in sorted(there.keys() | here.keys()):
                theirs = there.get(path)
                ours = here.get(path)
                both = theirs is not None and ours is not None
                if theirs.same_codes(ours) if both else theirs is ours:
                    continue
                words = []
                for kind in (theirs, ours):
                    source = "" if kind is None else kind.quantized_from
                    named = "in 16 or 32 bit" if kind is None else str(kind)
                    words.append(f"{named}, quantised from {source}" if source else named)
                return f"{path} is {words[0]} there, {words[1]} here"
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
        """Name of the 4-bit codes, such as ``NF4``."""
        return " and ".join(sorted({kind.code.upper() for kind in self.kinds}))


def path_without_adapters(path: str) -> str:
    """Return the path that a module has in a model without adapters."""
    return ".".join(part for part in path.split(".") if part != BESIDE_ADAPTERS)
