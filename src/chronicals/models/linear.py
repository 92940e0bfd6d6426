"""Reads a linear layer: the plain layer, and the adapter around it.

Classes of adapted layers are not named here. Each registers a function that reads its adapter
(``register_adapter_reader``). PEFT's classes are recognised by name, so that PEFT need not be
installed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn

from chronicals.kernels.linear_head import Adapter
from chronicals.quantization import PackedLinear, packed_weight
from chronicals.quantization.bitsandbytes_layer import as_ours


class UnknownLinear(ValueError):
    """The layer is neither a plain linear layer nor one with plain LoRA.

    The message continues a sentence that begins with the layer's name.
    """


class ReadLinear(NamedTuple):
    """The current state of a linear layer; its adapter may be switched off or merged later.

    Attributes:
        layer: the plain layer, with a dense or a packed weight.
        adapter: its active adapter, or None.
        rank: rank of its adapter, active or not; 0 without one.
    """

    layer: nn.Linear | PackedLinear
    adapter: Adapter | None
    rank: int


AdapterReader = Callable[[Any], tuple[Adapter | None, bool]]
"""A function of a layer that returns its adapter, or None, and True if the adapter is on."""

_READERS: dict[type, AdapterReader] = {}
"""Readers by class of the adapted layer."""


def register_adapter_reader(kind: type, reader: AdapterReader) -> None:
    """Register a class of layers for ``read_linear``.

    Subclasses are not included, since they may compute more.

    Args:
        kind: a class whose layers add an adapter to their ``base_layer``.
        reader: reads that adapter.
    """
    _READERS[kind] = reader


def _read_peft_adapter(layer: Any) -> tuple[Adapter | None, bool]:
    """Return the active adapter of PEFT's LoRA layer, and True if it is on.

    The adapter is None if none is active, or if it is merged.
    """
    names = [] if layer.merged else [name for name in layer.active_adapters if name in layer.lora_A]
    if not names:
        return None, False
    if (
        len(names) > 1
        or names[0] in layer.lora_variant
        or layer.lora_bias.get(names[0])
        or layer.fan_in_fan_out
    ):
        raise UnknownLinear(f"has adapters that are more than one plain LoRA: {', '.join(names)}")
    (name,) = names
    dropout = getattr(layer.lora_dropout[name], "p", 0.0) if layer.training else 0.0
    adapter = Adapter(
        layer.lora_A[name].weight, layer.lora_B[name].weight, layer.scaling[name], dropout
    )
    return adapter, not layer.disable_adapters


PEFT_LAYERS = ("peft.tuners.lora.layer.Linear", "peft.tuners.lora.bnb.Linear4bit")
"""Qualified names of PEFT's classes of layers that add an adapter to their ``base_layer``."""


def read_linear(layer: Any) -> ReadLinear:
    """Return the plain linear layer that ``layer`` is or wraps, and its adapter.

    Raises:
        UnknownLinear: it is any other kind of layer.
    """
    adapter = None
    on = False
    reader = _READERS.get(type(layer))
    if reader is None and f"{type(layer).__module__}.{type(layer).__qualname__}" in PEFT_LAYERS:
        reader = _read_peft_adapter
    if reader is not None:
        adapter, on = reader(layer)
        layer = layer.base_layer
    try:
        layer = as_ours(layer)
    except ValueError as error:
        raise UnknownLinear(str(error)) from None
    if type(layer) is not nn.Linear and packed_weight(layer) is None:
        raise UnknownLinear(f"is {type(layer).__name__}, not a plain torch.nn.Linear")
    return ReadLinear(layer, adapter if on else None, 0 if adapter is None else len(adapter.a))
