"""The output head of a causal language model as tensors and numbers.

A loss takes a ``Head`` instead of a raw weight, so that scale, softcap and bias come with it. A
head of an unknown kind is refused by name instead of being computed wrongly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from chronicals.kernels.linear_head import Adapter, Rows
from chronicals.models.linear import UnknownLinear, read_linear
from chronicals.quantization import packed_weight


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
        """Return logits ``[..., V]`` of hidden states ``[..., D]``.

        The products are in the dtype of ``hidden``, everything after them in at least fp32.
        """
        dtype = hidden.dtype
        x = F.linear(
            hidden, self.weight.to(dtype), None if self.bias is None else self.bias.to(dtype)
        )
        if self.adapter is not None:
            down = F.linear(F.dropout(hidden, self.adapter.dropout), self.adapter.a.to(dtype))
            x = x + self.adapter.scale * F.linear(down, self.adapter.b.to(dtype))
        x = x.to(torch.promote_types(dtype, torch.float32)) * self.scale
        return x if self.softcap is None else self.softcap * torch.tanh(x / self.softcap)


SCALES: dict[str, Callable[[float], float]] = {
    "logit_scale": lambda factor: factor,  # Cohere
    "logits_scaling": lambda divisor: 1.0 / divisor,  # Granite
    "lm_head_multiplier": lambda factor: factor,  # Falcon-H1
}
"""Configuration fields that scale the logits, and the factor as a function of the field."""


def read_head(model: Any) -> Head:
    """Return the current head of a causal language model.

    Its adapters may be switched off or merged later, so callers read it again when they need it.

    Raises:
        UnknownHead: there is no output embedding, or it is neither a plain linear layer nor one
            with plain LoRA.
    """
    try:
        output, rows = _with_trained_rows(model.get_output_embeddings())
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
    for field, factor in SCALES.items():
        value = getattr(config, field, None)
        if value is not None:
            scale *= factor(value)
    softcap = getattr(config, "final_logit_softcapping", None)
    return Head(layer.weight, layer.bias, scale, softcap, adapter, rows)


_LAYERS_WITH_ROWS: set[type] = set()
"""Classes of layers that train some rows of a frozen table."""


def register_layer_with_rows(kind: type) -> None:
    """Register a class of layers, without its subclasses, for ``read_head``.

    Args:
        kind: a class whose layers have a frozen ``base_layer``, and ``rows``: a ``Rows`` that
            replaces some of its rows, or None.
    """
    _LAYERS_WITH_ROWS.add(kind)


def _with_trained_rows(layer: Any) -> tuple[Any, Rows | None]:
    """Return a head without its separately trained rows, and these rows or None."""
    if type(layer) not in _LAYERS_WITH_ROWS:
        return layer, None
    return layer.base_layer, layer.rows
