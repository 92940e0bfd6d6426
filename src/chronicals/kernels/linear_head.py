"""A linear head a chunk of rows at a time: what the losses over its logits share.

An adapter (A, B, α) continues the columns of the head and of the states: ``h Wᵀ + α (h Aᵀ) Bᵀ = [h,
α h Aᵀ] [W, B]ᵀ``.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from chronicals.kernels.adapter import Adapter
from chronicals.kernels.logit_rows import IGNORE_INDEX


def chunks(rows: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


def chunk_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, buffer: Tensor) -> Tensor:
    """Raw logits of some rows, written to the first rows of ``buffer``."""
    out = buffer[: len(hidden)]
    if bias is None:
        return torch.mm(hidden, weight.t(), out=out)
    return torch.addmm(bias.to(hidden.dtype), hidden, weight.t(), out=out)


def product_type(hidden: Tensor) -> torch.dtype:
    """The type of the products: autocast's where it is on, else that of ``hidden``."""
    kind = hidden.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype


def check_head(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    chunk_size: int,
    softcap: float | None,
) -> None:
    """Raises ValueError unless hidden is ``[T, D]``, weight ``[V, D]``, targets int64 or int32
    ``[T]``, bias ``[V]``, and the numbers are in their ranges."""
    if chunk_size < 1:
        raise ValueError(f"chunk_size={chunk_size}: must be at least 1")
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(
            f"softcap={softcap}: must be a positive number, or None where there is no bound"
        )
    if targets.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"targets are {targets.dtype}: expected torch.int64; give targets.long()")
    if (
        hidden.ndim != 2
        or weight.ndim != 2
        or hidden.shape[1] != weight.shape[1]
        or targets.shape != hidden.shape[:1]
    ):
        raise ValueError(
            f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)}, targets "
            f"{tuple(targets.shape)}: expected "
            "[T, D], [V, D] and [T]"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias has shape {tuple(bias.shape)}: expected [{len(weight)}]")


def side_by_side(weight: Tensor, more: Tensor | None, kind: torch.dtype) -> Tensor:
    """A head ``[V, D]`` with the columns ``[V, r]`` that continue it."""
    return weight.to(kind) if more is None else torch.cat((weight.to(kind), more.to(kind)), 1)


def with_adapter(
    hidden: Tensor, weight: Tensor, adapter: Adapter | None
) -> tuple[Tensor, Tensor | None]:
    """``hidden`` continued by ``α (h Aᵀ)``, and B, which continues the columns of ``weight``.

    Raises:
        ValueError: the adapter's shapes do not fit.
    """
    if adapter is None:
        return hidden, None
    a = adapter.a
    more = adapter.b
    if a.ndim != 2 or a.shape[1] != hidden.shape[1] or more.shape != (len(weight), len(a)):
        raise ValueError(
            f"adapter is {tuple(a.shape)}, {tuple(more.shape)}: expected [r, {hidden.shape[1]}] "
            "and [V, r]"
        )
    down = torch.nn.functional.dropout(hidden, adapter.dropout) @ a.t().to(hidden.dtype)
    return torch.cat((hidden, (adapter.scale * down).to(hidden.dtype)), 1), more


def trained_rows(targets: Tensor, count: int | None) -> Tensor | None:
    """Places of the targets that count, where they can be had without asking a device for a
    number; else None.
    """
    kept = targets != IGNORE_INDEX
    if targets.device.type == "cpu":
        return kept.nonzero().squeeze(1)
    return None if count is None or count >= len(targets) else _places(kept, count)


def _places(kept: Tensor, count: int) -> Tensor:
    """``count`` places of a mask without a synchronisation: those of its true entries, then
    others to make up the number.
    """
    before = kept.cumsum(0)
    slot = torch.where(kept, before - 1, before[-1] - 1 + (~kept).cumsum(0))
    return torch.empty_like(slot).scatter_(0, slot, torch.arange(len(kept), device=kept.device))[
        :count
    ]
