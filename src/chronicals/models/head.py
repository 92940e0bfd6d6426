"""Head: what a causal language model does with its last hidden states, as tensors and numbers.

A loss takes the module, not a raw weight: scale, softcap and bias come with it, and a head that is
not understood is refused by name instead of being computed wrongly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from chronicals.kernels.adapter import Adapter, Rows
from chronicals.models.linear import UnknownLinear, read_linear
from chronicals.quantization import packed_weight


class UnknownHead(ValueError):
    """The output layer is of a kind that is not understood."""


@dataclass(frozen=True)
class Head:
    """``softcap · tanh(scale · (h Wᵀ + b + α (dropout(h) Aᵀ) Bᵀ) / softcap)``.

    Attributes:
        table: ``[V, D]``, as it is stored.
        bias: ``[V]`` or None.
        scale: factor on the logits.
        softcap: bound of the logits, or None.
        adapter: A, B and α of LoRA on the head, or None; without dropout where the layer is not
            being trained.
        rows: of the table that trained ones stand for, or None.
    """

    table: Tensor
    bias: Tensor | None
    scale: float
    softcap: float | None
    adapter: Adapter | None = None
    rows: Rows | None = None

    @property
    def weight(self) -> Tensor:
        """W: the table, or a copy of it with the trained rows; who takes table and rows apart
        makes none.
        """
        return self.table if self.rows is None else self.rows.within(self.table)

    def logits(self, hidden: Tensor) -> Tensor:
        """``[..., V]`` of ``hidden`` ``[..., D]``: products in the dtype of ``hidden``, the rest
        in at least fp32.
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
"""Configuration fields that multiply the logits, and the factor they stand for."""


def read_head(model: Any) -> Head:
    """The head of a transformers causal language model as it is now: its adapters may be switched
    off or merged later.

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
"""Classes of layers some of whose rows are trained by themselves."""


def register_layer_with_rows(kind: type) -> None:
    """Let ``read_head`` read layers of a class, not of its subclasses.

    Args:
        kind: a class whose layers have a frozen ``base_layer`` and ``rows``, a ``Rows`` that
            replaces some of its rows, or None.
    """
    _LAYERS_WITH_ROWS.add(kind)


def _with_trained_rows(layer: Any) -> tuple[Any, Rows | None]:
    """Return a head without its trained rows, and these."""
    if type(layer) not in _LAYERS_WITH_ROWS:
        return layer, None
    return layer.base_layer, layer.rows
