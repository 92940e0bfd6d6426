"""Reading a linear layer: what it is below an adapter, and the adapter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from chronicals.kernels.adapter import Adapter


class UnknownLinear(ValueError):
    """The layer is neither a plain linear layer nor one with plain LoRA; the message goes on from its name."""


def _of_chronicals(layer: Any) -> Adapter:
    return Adapter(layer.lora_A, layer.lora_B, layer.scale, layer.dropout if layer.training else 0.0)


def _of_peft(layer: Any) -> Adapter | None:
    """The one active adapter of PEFT's LoRA layer; None where none is, or where it is merged."""
    names = [] if layer.disable_adapters or layer.merged else [name for name in layer.active_adapters if name in layer.lora_A]
    if not names:
        return None
    if len(names) > 1 or names[0] in layer.lora_variant or layer.lora_bias.get(names[0]) or layer.fan_in_fan_out:
        raise UnknownLinear(f"has adapters that are more than one plain LoRA: {', '.join(names)}")
    (name,) = names
    dropout = getattr(layer.lora_dropout[name], "p", 0.0) if layer.training else 0.0
    return Adapter(layer.lora_A[name].weight, layer.lora_B[name].weight, layer.scaling[name], dropout)


ADAPTED: dict[str, Callable[[Any], Adapter | None]] = {
    "chronicals.lora.layers.LoRALinear": _of_chronicals,
    "peft.tuners.lora.layer.Linear": _of_peft,
}
"""Layers that add an adapter to their ``base_layer``, and how it is read from them."""


def read_linear(layer: Any) -> tuple[nn.Linear, Adapter | None]:
    """The plain linear layer that ``layer`` is or is built on, and its adapter as it is now: it may be off or merged later.

    Raises:
        UnknownLinear: it is something else.
    """
    adapter = None
    read_adapter = ADAPTED.get(f"{type(layer).__module__}.{type(layer).__qualname__}")
    if read_adapter is not None:
        layer, adapter = layer.base_layer, read_adapter(layer)
    if type(layer) is not nn.Linear:
        raise UnknownLinear(f"is {type(layer).__name__}, not a plain torch.nn.Linear")
    return layer, adapter
