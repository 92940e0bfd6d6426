"""Reads linear layers, and the output head of a causal language model, as tensors and numbers.

Classes of adapted layers are not named here. Each enters a function that reads its adapter into
``ADAPTER_READERS``. PEFT's classes are recognised by name, so that PEFT need not be
installed.

A loss takes a ``Head`` instead of a raw weight, so that scale, softcap and bias come with it. A
head of an unknown kind is refused by name instead of being computed wrongly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from chronicals.kernels.linear_head import Adapter, Rows
from chronicals.models.host_tables import weight_in_use
from chronicals.quantization import PackedLinear, packed_weight
from chronicals.quantization.bitsandbytes import is_of_bitsandbytes, shared


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

ADAPTER_READERS: dict[type, AdapterReader] = {}
"""Readers by class, whose layers add an adapter to their ``base_layer``.

Subclasses are not included, since they may compute more.
"""


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
    reader = ADAPTER_READERS.get(type(layer))
    if reader is None and f"{type(layer).__module__}.{type(layer).__qualname__}" in PEFT_LAYERS:
        reader = _read_peft_adapter
    if reader is not None:
        adapter, on = reader(layer)
        layer = layer.base_layer
    try:
        layer = shared(layer) if is_of_bitsandbytes(layer) else layer
    except ValueError as error:
        raise UnknownLinear(str(error)) from None
    if type(layer) is not nn.Linear and packed_weight(layer) is None:
        raise UnknownLinear(f"is {type(layer).__name__}, not a plain torch.nn.Linear")
    return ReadLinear(layer, adapter if on else None, 0 if adapter is None else len(adapter.a))


class UnknownHead(ValueError):
    """The output layer is of an unsupported kind."""


@dataclass(frozen=True)
class Head:
    """The function ``softcap · tanh(scale · (h Wᵀ + b + α (dropout(h) Aᵀ) Bᵀ) / softcap)``.

    Attributes:
        table: ``[V, D]`` as stored, without the trained rows.
        bias: ``[V]`` or None.
        scale: factor on the logits.
        softcap: bound of the logits, or None.
        adapter: A, B and α of LoRA on the head, or None; its dropout is 0 unless the layer is in
            training mode.
        rows: rows of the table that are replaced by trained ones, or None.
    """

    table: Tensor
    bias: Tensor | None
    scale: float
    softcap: float | None
    adapter: Adapter | None = None
    rows: Rows | None = None

    @property
    def weight(self) -> Tensor:
        """W ``[V, D]``: the table, or a copy of it with the trained rows.

        A caller that handles ``table`` and ``rows`` separately avoids the copy.
        """
        return self.table if self.rows is None else self.rows.within(self.table)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits ``[..., V]`` of hidden states ``[..., D]``, in at least fp32.

        The products are in the dtype of ``hidden``, everything after them in at least fp32.
        """
        return self.narrow_logits(hidden).to(torch.promote_types(hidden.dtype, torch.float32))

    def narrow_logits(self, hidden: Tensor) -> Tensor:
        """Return the values of ``logits``, in the dtype of ``hidden`` if nothing follows the products."""
        dtype = hidden.dtype
        x = F.linear(
            hidden, self.weight.to(dtype), None if self.bias is None else self.bias.to(dtype)
        )
        if self.adapter is not None:
            down = F.linear(F.dropout(hidden, self.adapter.dropout), self.adapter.a.to(dtype))
            x = x + self.adapter.scale * F.linear(down, self.adapter.b.to(dtype))
        if self.scale == 1.0 and self.softcap is None:
            return x
        x = x.to(torch.promote_types(dtype, torch.float32)) * self.scale
        return x if self.softcap is None else self.softcap * torch.tanh(x / self.softcap)


LOGIT_SCALES: dict[str, Callable[[float], float]] = {
    "logit_scale": lambda factor: factor,  # Cohere
    "logits_scaling": lambda divisor: 1.0 / divisor,  # Granite
    "lm_head_multiplier": lambda factor: factor,  # Falcon-H1
}
"""Configuration fields that scale the logits, and the factor as a function of the field."""


LAYERS_WITH_ROWS: set[type] = set()
"""Classes, without their subclasses, of layers that train some rows of a frozen table.

Such a layer has a frozen ``base_layer``, and ``rows``: a ``Rows`` that replaces some of its rows,
or None.
"""


def read_head(model: Any) -> Head:
    """Return the current head of a causal language model.

    Its adapters may be switched off or merged later, so callers read it again when they need it. A
    table in host memory is copied to the card.

    Raises:
        UnknownHead: there is no output embedding, or it is neither a plain linear layer nor one
            with plain LoRA.
    """
    try:
        output = model.get_output_embeddings()
        rows = None
        if type(output) in LAYERS_WITH_ROWS:
            rows = output.rows
            output = output.base_layer
        layer, adapter, _ = read_linear(output)
    except UnknownLinear as error:
        raise UnknownHead(f"the output layer of {type(model).__name__} {error}") from None
    if packed_weight(layer) is not None:
        raise UnknownHead(f"the output layer of {type(model).__name__} has its weight packed")
    if adapter is not None and adapter.magnitude is not None:
        raise UnknownHead(
            f"the output layer of {type(model).__name__} has DoRA (use_dora), whose magnitudes no "
            "loss knows"
        )
    config = model.config.get_text_config()
    scale = 1.0
    for field, factor in LOGIT_SCALES.items():
        value = getattr(config, field, None)
        if value is not None:
            scale *= factor(value)
    softcap = getattr(config, "final_logit_softcapping", None)
    return Head(weight_in_use(layer), layer.bias, scale, softcap, adapter, rows)
